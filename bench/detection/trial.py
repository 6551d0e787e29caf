"""One text tested with one key: the score of the detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.detection.texts import Reader
from descant.config.watermarking_config import BaseWatermarkingConfig
from descant.decoding.watermark.detection import Detector, build_schemes
from descant.decoding.watermark.statistics import WatermarkScheme

__all__ = ["Score", "score_ids", "score_text"]


class Score(NamedTuple):
    """The result of a test."""

    scored: int
    z: float
    p: float  # p-value: unmarked text scores as high or higher
    above: float  # p-value: unmarked text scores higher; differs from p for discrete distributions


def score_ids(
    settings: BaseWatermarkingConfig, vocabulary: int, ids: Sequence[int], lengths: Sequence[int]
) -> list[Score]:
    """The scores of the first `lengths` tokens of a text with a key and all its nonces.

    A token's score depends only on the tokens before it, so a prefix of the scores is that of the text.
    """
    array = np.asarray(ids, np.int64)
    schemes = [(scheme, *scheme.score_tokens(array)) for scheme in build_schemes(settings, vocabulary)]
    out = []
    for length in lengths:
        parts = [
            _score(scheme, scored[:length], value[:length], len(schemes)) for scheme, scored, value in schemes
        ]
        out.append(min(parts, key=lambda one: one.p))
    return out


def _score(scheme: WatermarkScheme, scored: np.ndarray, value: np.ndarray, tests: int) -> Score:
    count, total = int(scored.sum()), float(value.sum())
    if count == 0:
        return Score(0, 0.0, 1.0, 1.0)
    z = (total - count * scheme.null_mean) / (scheme.null_std * math.sqrt(count))
    p, above = (min(1.0, tests * scheme.p_value(count, one)) for one in (total, total + 1e-5))
    return Score(count, z, p, above)


def score_text(settings: BaseWatermarkingConfig, reader: Reader, text: str) -> Score:
    """The score of a text without token ids, over all its tokenisations."""
    found = Detector(settings, reader.vocabulary, reader.tokenizer).text(text)
    return Score(found.scored, found.z, found.p_value, found.p_value)
