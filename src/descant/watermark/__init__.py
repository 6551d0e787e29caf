"""Watermarks found again: what a text says for a mark, and how sure one may be."""

from descant.marking.keys import (
    PublicKeyWarning,
    fingerprint,
    new_settings,
    read_settings,
    write_settings,
)
from descant.watermark.detection import Detection, Detector
from descant.watermark.evidence import Evidence, Scheme
from descant.watermark.green import GreenScheme, WatermarkDetector, WatermarkDetectorOutput
from descant.watermark.gumbel import RaceScheme
from descant.watermark.page import page
from descant.watermark.schemes import schemes_of
from descant.watermark.statistics import needed
from descant.watermark.synthid import (
    SynthIDTextWatermarkDetector,
    TournamentScheme,
    mean_score,
    weighted_mean_score,
)

__all__ = [
    "Detection",
    "Detector",
    "Evidence",
    "GreenScheme",
    "PublicKeyWarning",
    "RaceScheme",
    "Scheme",
    "SynthIDTextWatermarkDetector",
    "TournamentScheme",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "fingerprint",
    "mean_score",
    "needed",
    "new_settings",
    "page",
    "read_settings",
    "schemes_of",
    "weighted_mean_score",
    "write_settings",
]
