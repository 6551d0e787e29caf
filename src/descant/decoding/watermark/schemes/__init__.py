"""Marking: the keyed functions of the watermarks, which whoever marks and whoever detects must ask alike."""

from descant.decoding.watermark.schemes.config import (
    GumbelWatermarkingConfig,
    Settings,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    settings_of,
)

__all__ = [
    "GumbelWatermarkingConfig",
    "Settings",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "settings_of",
]
