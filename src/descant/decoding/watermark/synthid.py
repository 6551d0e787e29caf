"""SynthID-Text found again: the mean of a text's coins, and the documented detector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.decoding.watermark.schemes.config import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.synthid import get_tournament, repetition_mask
from descant.decoding.watermark.scores import Array, TokenScores
from descant.decoding.watermark.statistics import binomial_tail, weighted_tail
from descant.errors import InputError

__all__ = [
    "SynthIDScheme",
    "SynthIDTextWatermarkDetector",
    "mean_score",
    "round_weights",
    "weighted_mean_score",
]

WEIGHTINGS: Final = ("weighted", "mean")
# By how many standard deviations of a token's value the mean of a marked text is higher at the least: real
# models (15M and 135M, 9 and 30 rounds) give 0.5 at temperature 0.7, and at 0.4 still 0.22 to 0.36.
MIN_EFFECT_SIZE: Final = 0.2


def round_weights(depth: int) -> Array:
    """How much each round counts [D]: from 10 to 1 in a line, as later ones mark less; their sum is 1."""
    weights: Array = np.linspace(10.0, 1.0, depth)
    scaled: Array = weights / weights.sum()
    return scaled


class SynthIDScheme:
    """SynthID-Text as a detector asks it: a token's value is the mean of its coins, one a round.

    A token is scored if the ids hold its whole context, the context is not one that marking passes over as
    repeated, and no token before it had the same coins whatever the key. Over random keys each of its coins
    is any place of the sampling table, so that it is a one as often as the table has them. Rounds with the
    same key have the same coins, of which only the first count.
    """

    name = "synthid"

    def __init__(self, settings: SynthIDTextWatermarkingConfig, weighting: str = "weighted") -> None:
        if weighting not in WEIGHTINGS:
            raise InputError("weighting", f"must be one of {', '.join(WEIGHTINGS)}", weighting)
        self.settings = settings
        self.weighting = weighting
        self._tournament = get_tournament(settings)
        self._rounds = self._tournament.distinct_rounds
        depth = len(settings.keys)
        weights = (round_weights(depth) if weighting == "weighted" else np.ones(depth))[self._rounds]
        self._weights = weights / weights.sum()
        self.context_size = self._tournament.context_size
        chance = self._tournament.ones_fraction
        self.null_mean = chance
        self.null_std = math.sqrt(chance * (1.0 - chance) * float((self._weights**2).sum()))
        self.min_marked_mean = self.null_mean + MIN_EFFECT_SIZE * self.null_std

    def score_tokens(self, ids: Array) -> TokenScores:
        """The mean coin of the tokens [L]."""
        scored, value = np.zeros(len(ids), bool), np.zeros(len(ids))
        if len(ids) <= self.context_size:
            return TokenScores(scored, value)
        tokens = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))
        contexts, after = self._tournament.context_hashes(tokens[:-1]), tokens[self.context_size :]
        fresh = ~repetition_mask(contexts[None], self.settings.context_history_size)[0].numpy()
        places = np.flatnonzero(fresh)
        asked = self._tournament.g_value_inputs(contexts, after).numpy()[places]
        places = places[np.sort(np.unique(asked, return_index=True)[1])]
        coins = self._tournament.g_values(contexts[places], after[places]).numpy()
        scored[self.context_size + places] = True
        value[self.context_size + places] = coins[:, self._rounds] @ self._weights
        return TokenScores(scored, value)

    def p_value(self, count: int, total: float) -> float:
        """The probability that the values of `count` unmarked tokens sum to `total` or more."""
        if self.weighting == "mean":
            depth = len(self._rounds)
            return binomial_tail(count * depth, math.ceil(total * depth - 1e-6), self.null_mean)
        return weighted_tail(count, self._weights, self.null_mean, total)


def mean_score(g_values: Tensor, mask: Tensor) -> Tensor:
    """The mean coin of each text [N], of coins [N, C, D] where the mask [N, C] holds; NaN where nowhere."""
    return _masked_mean(g_values, mask, np.full(_check_depth(g_values, mask), 1.0 / g_values.shape[2]))


def weighted_mean_score(g_values: Tensor, mask: Tensor, weights: Array | None = None) -> Tensor:
    """The same with weights [D] for the rounds, by default falling from 10 to 1 in a line."""
    depth = _check_depth(g_values, mask)
    given = round_weights(depth) if weights is None else np.asarray(weights, dtype=np.float64)
    if given.shape != (depth,) or not (given >= 0).all() or not given.sum() > 0:
        raise InputError("weights", f"must be {depth} numbers >= 0, not all of them 0", weights)
    return _masked_mean(g_values, mask, given / given.sum())


def _masked_mean(g_values: Tensor, mask: Tensor, weights: Array) -> Tensor:
    value = (g_values.double() * torch.from_numpy(weights).to(g_values.device)).sum(2)
    there = mask.to(g_values.device, torch.float64)
    return ((value * there).sum(1) / there.sum(1)).float()


def _check_depth(g_values: Tensor, mask: Tensor) -> int:
    """How many rounds there were, the shapes being checked."""
    if g_values.ndim != 3:
        raise InputError("g_values", "must be of shape [batch, tokens, depth]", g_values)
    if mask.shape != g_values.shape[:2]:
        raise InputError("mask", f"must be of shape {list(g_values.shape[:2])}", mask)
    return int(g_values.shape[2])


class SynthIDTextWatermarkDetector:
    """What a detector module says of the coins of texts, those after the end or a repeated context left out.

    The module is asked `(g_values [N, C, D], mask [N, C])`: a `BayesianDetectorModel`, or without training
    `mean_score` or `weighted_mean_score`.
    """

    def __init__(
        self, detector_module: Callable[[Tensor, Tensor], Any], logits_processor: Any, tokenizer: Any
    ) -> None:
        self.detector_module = detector_module
        self.logits_processor = logits_processor
        self.tokenizer = tokenizer

    def __call__(self, tokenized_outputs: Tensor) -> Any:
        """The module's answer to texts [N, L] of token ids."""
        processor, end = self.logits_processor, self.tokenizer.eos_token_id
        g_values = processor.compute_g_values(tokenized_outputs)
        mask = processor.compute_context_repetition_mask(tokenized_outputs)
        if end is not None:  # a tokenizer without an end token has none to leave out
            before = processor.compute_eos_token_mask(tokenized_outputs, end)
            mask = mask & before[:, processor.ngram_len - 1 :]
        return self.detector_module(g_values, mask)
