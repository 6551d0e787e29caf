"""Keyed functions of the watermark schemes, shared by marking and detection."""

from descant.config.watermarking_config import (
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
