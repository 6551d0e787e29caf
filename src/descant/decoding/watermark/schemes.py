"""The parts of each watermark scheme, by the type of its settings."""

from __future__ import annotations

from typing import Any

from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.processors.base import LogitsProcessor
from descant.decoding.watermark.green_list import GreenListScheme, WatermarkLogitsProcessor, config_vocab_size
from descant.decoding.watermark.gumbel import GumbelScheme, GumbelWatermarkLogitsProcessor
from descant.decoding.watermark.statistics import WatermarkScheme
from descant.decoding.watermark.synthid import SynthIDScheme, SynthIDTextWatermarkLogitsProcessor
from descant.errors import InputError

__all__ = [
    "GumbelWatermarkingConfig",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "build_schemes",
    "make_watermark_processor",
    "resolve_vocab_size",
]


def build_schemes(settings: BaseWatermarkingConfig, vocab_size: int) -> list[WatermarkScheme]:
    """Return the schemes to test for these settings: one, or one per possible nonce."""
    if isinstance(settings, WatermarkingConfig):
        return [GreenListScheme(settings, vocab_size)]
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return [SynthIDScheme(settings)]
    if isinstance(settings, GumbelWatermarkingConfig):
        nonces = range(settings.nonces) if settings.nonce is None else [settings.nonce]
        return [GumbelScheme(settings, nonce) for nonce in nonces]
    raise InputError("keys", "must be watermark settings", settings)


def resolve_vocab_size(vocabulary: Any) -> int:
    """Return the vocabulary size from a number, a model or its config."""
    if isinstance(vocabulary, int) and not isinstance(vocabulary, bool):
        if vocabulary < 1:
            raise InputError("vocabulary", "must be >= 1", vocabulary)
        return vocabulary
    size = config_vocab_size(getattr(vocabulary, "config", vocabulary))
    if size is None or size < 1:
        raise InputError("vocabulary", "must be a number, a model or a model's config", vocabulary)
    return size


def make_watermark_processor(
    settings: BaseWatermarkingConfig, vocab_size: int, device: Any
) -> LogitsProcessor:
    """The processor that marks text with these settings."""
    values = settings.to_dict()
    if isinstance(settings, WatermarkingConfig):
        return WatermarkLogitsProcessor(vocab_size, device, **values)
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return SynthIDTextWatermarkLogitsProcessor(**values, device=device)
    return GumbelWatermarkLogitsProcessor(**values)


BaseWatermarkingConfig.processor_factory = make_watermark_processor  # for `construct_processor`
