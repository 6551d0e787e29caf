"""Marking: the keyed functions of the watermarks, which whoever marks and whoever detects must ask alike."""

from descant.decoding.watermark.schemes.config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    as_watermarking_config,
)

__all__ = [
    "BaseWatermarkingConfig",
    "GumbelWatermarkingConfig",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "as_watermarking_config",
]
