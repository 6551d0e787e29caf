"""Builds the detection schemes of watermark settings."""

from __future__ import annotations

from typing import Any

from descant.decoding.watermark.green_list import GreenListScheme, config_vocab_size
from descant.decoding.watermark.gumbel import GumbelScheme
from descant.decoding.watermark.schemes import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark.scores import WatermarkScheme
from descant.decoding.watermark.synthid import SynthIDScheme
from descant.errors import InputError

__all__ = ["build_schemes", "resolve_vocab_size"]


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
