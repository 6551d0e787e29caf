"""Schemes: the watermarks that settings stand for, and the vocabulary they share out."""

from __future__ import annotations

from typing import Any

from descant.decoding.watermark.green import GreenScheme, vocabulary_in
from descant.decoding.watermark.gumbel import RaceScheme
from descant.decoding.watermark.schemes import (
    GumbelWatermarkingConfig,
    Settings,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark.scores import Scheme
from descant.decoding.watermark.synthid import TournamentScheme
from descant.errors import InputError

__all__ = ["schemes_of", "vocabulary_of"]


def schemes_of(settings: Settings, vocabulary: int) -> list[Scheme]:
    """What must be asked to find the mark of these settings: one scheme, or one for each possible nonce."""
    if isinstance(settings, WatermarkingConfig):
        return [GreenScheme(settings, vocabulary)]
    if isinstance(settings, SynthIDTextWatermarkingConfig):
        return [TournamentScheme(settings)]
    if isinstance(settings, GumbelWatermarkingConfig):
        nonces = range(settings.nonces) if settings.nonce is None else [settings.nonce]
        return [RaceScheme(settings, nonce) for nonce in nonces]
    raise InputError("keys", "must be settings of a watermark", settings)


def vocabulary_of(given: Any) -> int:
    """How many tokens a model scores: a number, or what a model or its config says."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise InputError("vocabulary", "must be >= 1", given)
        return given
    size = vocabulary_in(getattr(given, "config", given))
    if size is None or size < 1:
        raise InputError("vocabulary", "must be a number, a model or a model's config", given)
    return size
