"""SynthID's trained detector against its weighted mean, on texts outside the training set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.detection.corpus import LENGTH
from bench.detection.marks import marking_config, unrelated_config
from bench.detection.texts import Text
from descant.config.watermarking_config import BaseWatermarkingConfig, SynthIDTextWatermarkingConfig
from descant.decoding.watermark.synthid import get_tournament, repetition_mask, weighted_mean_score
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    GValueBatch,
    compute_metrics,
    train_detector,
)
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel

__all__ = ["compare_detectors"]

_MARK = "synthid"
_NEGATIVES = 3  # keys per unmarked text


def compare_detectors(
    marked: Sequence[Text], unmarked: Sequence[Text], lengths: Sequence[int]
) -> dict[str, Any]:
    """The share of marked texts that each detector finds at 1 % false positives, by length.

    Every second text is for training. Training uses g-values only, so texts of many keys can be combined.
    """
    positives = [_g_values(marking_config(_MARK, *text.tag), text) for text in marked]
    negatives = [
        _g_values(unrelated_config(_MARK, *text.tag, key), text)
        for key in range(_NEGATIVES)
        for text in unmarked
    ]
    model = BayesianDetectorModel(BayesianDetectorConfig(positives[0][0].shape[1]))
    model.prior.requires_grad_(False)  # half of each batch is marked
    # Train on as many unmarked texts as marked ones; the others set the threshold.
    training_negatives = negatives[: len(unmarked) : 2][: len(positives)]
    found = train_detector(
        model,
        GValueBatch.from_texts(positives[::2]),
        GValueBatch.from_texts(training_negatives),
        DetectorTrainingConfig(),
    )
    model.load_state_dict(found.state_dict)
    detectors: dict[str, Callable[[GValueBatch], Tensor]] = {
        "bayesian": lambda texts: model.log_odds(texts.g_values, texts.mask),
        "weighted": lambda texts: weighted_mean_score(*texts),
    }
    held_out = positives[1::2], negatives[1 : len(unmarked) : 2] + negatives[len(unmarked) :]
    return {
        str(length): {name: _figures(detector, held_out, length) for name, detector in detectors.items()}
        for length in lengths
    }


ScoredText = tuple[Tensor, Tensor]  # g-values [L, D] and the mask of scored tokens [L]


def _figures(
    detector: Callable[[GValueBatch], Tensor],
    held_out: tuple[list[ScoredText], list[ScoredText]],
    length: int,
) -> Any:
    with torch.no_grad():
        scores = [torch.cat([detector(part) for part in _parts(texts, length)]) for texts in held_out]
    one = compute_metrics(*scores)
    return {"hits": round(one.true_positives * one.marked), "count": one.marked, "unmarked": one.unmarked}


def _parts(texts: Sequence[ScoredText], length: int, size: int = 256) -> list[GValueBatch]:
    whole = max(len(mask) for _, mask in texts)
    end = length - (LENGTH - whole)  # the first tokens have no context
    short = [(g_values[:end], mask[:end]) for g_values, mask in texts]
    return [GValueBatch.from_texts(short[at : at + size]) for at in range(0, len(short), size)]


def _g_values(settings: BaseWatermarkingConfig, text: Text) -> ScoredText:
    assert isinstance(settings, SynthIDTextWatermarkingConfig)
    rounds, tokens = get_tournament(settings), torch.tensor(text.ids)
    contexts = rounds.context_hashes(tokens[:-1])
    fresh = ~repetition_mask(contexts[None], settings.context_history_size)[0]
    return rounds.g_values(contexts, tokens[rounds.context_size :]).float(), fresh
