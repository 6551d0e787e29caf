"""Watermark detection: schemes, statistics, detectors and reports."""

from descant.decoding.watermark.detection import Detection, Detector
from descant.decoding.watermark.green_list import GreenListScheme, WatermarkDetector, WatermarkDetectorOutput
from descant.decoding.watermark.gumbel import GumbelScheme
from descant.decoding.watermark.html_report import render_report
from descant.decoding.watermark.scheme_factory import build_schemes
from descant.decoding.watermark.schemes.keys import (
    PublicKeyWarning,
    fingerprint,
    new_settings,
    read_settings,
    write_settings,
)
from descant.decoding.watermark.scores import TokenScores, WatermarkScheme
from descant.decoding.watermark.statistics import required_tokens
from descant.decoding.watermark.synthid import (
    SynthIDScheme,
    SynthIDTextWatermarkDetector,
    mean_score,
    weighted_mean_score,
)

__all__ = [
    "Detection",
    "Detector",
    "GreenListScheme",
    "GumbelScheme",
    "PublicKeyWarning",
    "SynthIDScheme",
    "SynthIDTextWatermarkDetector",
    "TokenScores",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkScheme",
    "build_schemes",
    "fingerprint",
    "mean_score",
    "new_settings",
    "read_settings",
    "render_report",
    "required_tokens",
    "weighted_mean_score",
    "write_settings",
]
