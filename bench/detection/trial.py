"""One text tested under one key: what the detectors say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.detection.texts import Reader
from descant.decoding.watermark.detection import Detector
from descant.decoding.watermark.scheme_factory import build_schemes
from descant.decoding.watermark.schemes import BaseWatermarkingConfig
from descant.decoding.watermark.scores import WatermarkScheme

__all__ = ["Score", "of_ids", "of_text"]


class Score(NamedTuple):
    """What a test came to."""

    scored: int
    z: float
    p: float  # that unmarked text says as much or more
    above: float  # that it says more; as large but for laws with atoms


def of_ids(
    settings: BaseWatermarkingConfig, vocabulary: int, ids: Sequence[int], lengths: Sequence[int]
) -> list[Score]:
    """The text's first `lengths` tokens tested under a key, with every nonce there is.

    A token's evidence hangs on those before it only, so that of a beginning is the beginning's.
    """
    array = np.asarray(ids, np.int64)
    seen = [(scheme, *scheme.score_tokens(array)) for scheme in build_schemes(settings, vocabulary)]
    out = []
    for length in lengths:
        parts = [_score(scheme, scored[:length], value[:length], len(seen)) for scheme, scored, value in seen]
        out.append(min(parts, key=lambda one: one.p))
    return out


def _score(scheme: WatermarkScheme, scored: np.ndarray, value: np.ndarray, tests: int) -> Score:
    count, total = int(scored.sum()), float(value.sum())
    if count == 0:
        return Score(0, 0.0, 1.0, 1.0)
    z = (total - count * scheme.null_mean) / (scheme.null_std * math.sqrt(count))
    p, above = (min(1.0, tests * scheme.p_value(count, one)) for one in (total, total + 1e-5))
    return Score(count, z, p, above)


def of_text(settings: BaseWatermarkingConfig, reader: Reader, text: str) -> Score:
    """The text tested as somebody tests it who has nothing else, with all its readings."""
    found = Detector(settings, reader.vocabulary, reader.tokenizer).text(text)
    return Score(found.scored, found.z, found.p_value, found.p_value)
