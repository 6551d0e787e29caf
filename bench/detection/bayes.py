"""SynthID's trained detector beside its weighted mean, both on texts that the training has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.detection.corpus import LENGTH
from bench.detection.marks import other, own
from bench.detection.texts import Text
from descant.decoding.watermark.schemes import BaseWatermarkingConfig, SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.synthid import get_tournament, repetition_mask
from descant.decoding.watermark.synthid import weighted_mean_score
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    GValueBatch,
    compute_metrics,
    train_detector,
)
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel

__all__ = ["compared"]

_MARK = "synthid"
_NEGATIVES = 3  # keys under which an unmarked text is a test


def compared(marked: Sequence[Text], unmarked: Sequence[Text], lengths: Sequence[int]) -> dict[str, Any]:
    """The share of marked texts that each detector finds at 1 % false positives, length by length.

    Every second text is for training. Coins are all that is learnt from, so texts of many keys serve.
    """
    ones = [_seen(own(_MARK, *text.tag), text) for text in marked]
    others = [_seen(other(_MARK, *text.tag, turn), text) for turn in range(_NEGATIVES) for text in unmarked]
    model = BayesianDetectorModel(BayesianDetectorConfig(ones[0][0].shape[1]))
    model.prior.requires_grad_(False)  # batches are half marked
    # As many unmarked texts as marked ones to learn from; all that are left make the threshold.
    learnt = others[: len(unmarked) : 2][: len(ones)]
    found = train_detector(
        model, GValueBatch.from_texts(ones[::2]), GValueBatch.from_texts(learnt), DetectorTrainingConfig()
    )
    model.load_state_dict(found.state_dict)
    ways: dict[str, Callable[[GValueBatch], Tensor]] = {
        "bayesian": lambda texts: model.log_odds(texts.g_values, texts.mask),
        "weighted": lambda texts: weighted_mean_score(*texts),
    }
    held = ones[1::2], others[1 : len(unmarked) : 2] + others[len(unmarked) :]
    return {
        str(length): {name: _figures(way, held, length) for name, way in ways.items()} for length in lengths
    }


Seen = tuple[Tensor, Tensor]  # coins [L, D] and which tokens count [L]


def _figures(way: Callable[[GValueBatch], Tensor], held: tuple[list[Seen], list[Seen]], length: int) -> Any:
    with torch.no_grad():
        scores = [torch.cat([way(part) for part in _parts(texts, length)]) for texts in held]
    one = compute_metrics(*scores)
    return {"hits": round(one.true_positives * one.marked), "count": one.marked, "unmarked": one.unmarked}


def _parts(texts: Sequence[Seen], length: int, size: int = 256) -> list[GValueBatch]:
    whole = max(len(mask) for _, mask in texts)
    end = length - (LENGTH - whole)  # the first tokens have no context
    short = [(coins[:end], mask[:end]) for coins, mask in texts]
    return [GValueBatch.from_texts(short[at : at + size]) for at in range(0, len(short), size)]


def _seen(settings: BaseWatermarkingConfig, text: Text) -> Seen:
    assert isinstance(settings, SynthIDTextWatermarkingConfig)
    rounds, tokens = get_tournament(settings), torch.tensor(text.ids)
    contexts = rounds.context_hashes(tokens[:-1])
    fresh = ~repetition_mask(contexts[None], settings.context_history_size)[0]
    return rounds.g_values(contexts, tokens[rounds.context_size :]).float(), fresh
