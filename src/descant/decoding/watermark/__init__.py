"""Watermarks found again: what a text says for a mark, and how sure one may be."""

from descant.decoding.watermark.detection import Detection, Detector
from descant.decoding.watermark.green import GreenScheme, WatermarkDetector, WatermarkDetectorOutput
from descant.decoding.watermark.gumbel import RaceScheme
from descant.decoding.watermark.page import page
from descant.decoding.watermark.scheme_factory import schemes_of
from descant.decoding.watermark.schemes.keys import (
    PublicKeyWarning,
    fingerprint,
    new_settings,
    read_settings,
    write_settings,
)
from descant.decoding.watermark.scores import Evidence, Scheme
from descant.decoding.watermark.statistics import needed
from descant.decoding.watermark.synthid import (
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
