"""The processor of given watermark settings, for direct calls."""

from __future__ import annotations

from typing import Any

from descant.decoding.processors.base import LogitsProcessor
from descant.decoding.processors.green_list import WatermarkLogitsProcessor
from descant.decoding.processors.gumbel import GumbelWatermarkLogitsProcessor
from descant.decoding.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from descant.decoding.watermark.schemes import (
    BaseWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

__all__ = ["make_watermark_processor"]


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
