"""Schemes: the watermarks that settings stand for, and the vocabulary they share out."""

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


def build_schemes(settings: BaseWatermarkingConfig, vocabulary: int) -> list[WatermarkScheme]:
    """What must be asked to find the mark of these settings: one scheme, or one for each possible nonce."""
    if isinstance(settings, WatermarkingConfig):
        return [GreenListScheme(settings, vocabulary)]
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return [SynthIDScheme(settings)]
    if isinstance(settings, GumbelWatermarkingConfig):
        nonces = range(settings.nonces) if settings.nonce is None else [settings.nonce]
        return [GumbelScheme(settings, nonce) for nonce in nonces]
    raise InputError("keys", "must be settings of a watermark", settings)


def resolve_vocab_size(given: Any) -> int:
    """How many tokens a model scores: a number, or what a model or its config says."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise InputError("vocabulary", "must be >= 1", given)
        return given
    size = config_vocab_size(getattr(given, "config", given))
    if size is None or size < 1:
        raise InputError("vocabulary", "must be a number, a model or a model's config", given)
    return size
