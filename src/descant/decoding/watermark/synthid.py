"""Detection scheme of SynthID-Text (mean g-value), and the documented detector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.core.interfaces import Array
from descant.decoding.watermark.padding import PaddingTokens
from descant.decoding.watermark.schemes.synthid import get_tournament, repetition_mask
from descant.decoding.watermark.scores import TokenScores
from descant.decoding.watermark.statistics import binomial_tail, mean_interval, weighted_tail
from descant.errors import InputError

__all__ = [
    "SynthIDScheme",
    "SynthIDTextWatermarkDetector",
    "mean_score",
    "round_weights",
    "weighted_mean_score",
]

WEIGHTINGS: Final = ("weighted", "mean")
# Lowest effect size of marked text, in standard deviations of a token's value. Real models (15M and 135M
# parameters, 9 and 30 rounds) reach 0.5 at temperature 0.7 and still 0.22 to 0.36 at 0.4.
MIN_EFFECT_SIZE: Final = 0.2
_NO_TOKEN: Final = -1  # in place of padding


def round_weights(depth: int) -> Array:
    """Weights of the rounds [D]: linear from 10 to 1, since later rounds mark less, normalised to sum 1."""
    weights: Array = np.linspace(10.0, 1.0, depth)
    scaled: Array = weights / weights.sum()
    return scaled


class SynthIDScheme:
    """SynthID-Text: a token's value is the weighted mean of its g-values, one per round.

    A token is scored if its whole context is present, the context is not skipped as a repetition, and no
    earlier token had the same g-values under every key. Over random keys a g-value is a random entry of the
    sampling table, so it is 1 with the table's fraction of ones. Rounds with equal keys have equal g-values,
    of which only the first counts.
    """

    name = "synthid"
    prompt_reach = 0
    nonce: int | None = None

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
        ones_fraction = self._tournament.ones_fraction
        self.null_mean = ones_fraction
        self.null_std = math.sqrt(ones_fraction * (1.0 - ones_fraction) * float((self._weights**2).sum()))
        self.min_marked_mean = self.null_mean + MIN_EFFECT_SIZE * self.null_std

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L] by their mean g-value."""
        scored, values = np.zeros(len(ids), bool), np.zeros(len(ids))
        if len(ids) <= self.context_size:
            return TokenScores(scored, values)
        tokens = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))
        contexts, targets = self._tournament.context_hashes(tokens[:-1]), tokens[self.context_size :]
        is_new = ~repetition_mask(contexts[None], self.settings.context_history_size)[0].numpy()
        positions = np.flatnonzero(is_new)
        inputs = self._tournament.g_value_inputs(contexts, targets).numpy()[positions]
        positions = positions[np.sort(np.unique(inputs, return_index=True)[1])]
        g_values = self._tournament.g_values(contexts[positions], targets[positions]).numpy()
        scored[self.context_size + positions] = True
        values[self.context_size + positions] = g_values[:, self._rounds] @ self._weights
        return TokenScores(scored, values)

    def p_value(self, count: int, total: float) -> float:
        """Probability that the values of `count` unmarked tokens sum to `total` or more."""
        if self.weighting == "mean":
            depth = len(self._rounds)
            return binomial_tail(count * depth, math.ceil(total * depth - 1e-6), self.null_mean)
        return weighted_tail(count, self._weights, self.null_mean, total)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % Student interval of the mean, with at least the spread of unmarked text."""
        low, high = mean_interval(values, self.null_std)
        return max(0.0, low), min(1.0, high)


def mean_score(g_values: Tensor, mask: Tensor) -> Tensor:
    """Mean g-value of each text [N], from g-values [N, C, D] and their mask [N, C]; NaN if all are masked."""
    return _masked_mean(g_values, mask, np.full(_check_depth(g_values, mask), 1.0 / g_values.shape[2]))


def weighted_mean_score(g_values: Tensor, mask: Tensor, weights: Array | None = None) -> Tensor:
    """Like `mean_score`, with round weights [D] that by default fall linearly from 10 to 1."""
    depth = _check_depth(g_values, mask)
    round_weight = round_weights(depth) if weights is None else np.asarray(weights, dtype=np.float64)
    if round_weight.shape != (depth,) or not (round_weight >= 0).all() or not round_weight.sum() > 0:
        raise InputError("weights", f"must be {depth} numbers >= 0, not all 0", weights)
    return _masked_mean(g_values, mask, round_weight / round_weight.sum())


def _masked_mean(g_values: Tensor, mask: Tensor, weights: Array) -> Tensor:
    value = (g_values.double() * torch.from_numpy(weights).to(g_values.device)).sum(2)
    weight = mask.to(g_values.device, torch.float64)
    return ((value * weight).sum(1) / weight.sum(1)).float()


def _check_depth(g_values: Tensor, mask: Tensor) -> int:
    """Check the shapes and return the number of rounds."""
    if g_values.ndim != 3:
        raise InputError("g_values", "must be of shape [batch, tokens, depth]", g_values)
    if mask.shape != g_values.shape[:2]:
        raise InputError("mask", f"must be of shape {list(g_values.shape[:2])}", mask)
    return int(g_values.shape[2])


class SynthIDTextWatermarkDetector:
    """Applies a detector module to the g-values of texts, without padding, end tokens and repeated contexts.

    The module is called with `(g_values [N, C, D], mask [N, C])`: a `BayesianDetectorModel`, or, without
    training, `mean_score` or `weighted_mean_score`.
    """

    def __init__(
        self, detector_module: Callable[[Tensor, Tensor], Any], logits_processor: Any, tokenizer: Any
    ) -> None:
        self.detector_module = detector_module
        self.logits_processor = logits_processor
        self.tokenizer = tokenizer

    def __call__(self, tokenized_outputs: Tensor) -> Any:
        """Return the module's result for texts [N, L] of token ids."""
        processor, eos_token_id = self.logits_processor, self.tokenizer.eos_token_id
        g_values = processor.compute_g_values(tokenized_outputs)
        mask = processor.compute_context_repetition_mask(tokenized_outputs)
        is_text = self._text_mask(tokenized_outputs)
        context = processor.ngram_len - 1
        if eos_token_id is not None:  # a tokenizer may have no end token
            # Padding on the left may be the end token: it ends nothing.
            text = torch.where(is_text, tokenized_outputs, _NO_TOKEN)
            mask = mask & processor.compute_eos_token_mask(text, eos_token_id)[:, context:]
        # A token counts if its whole n-gram is text.
        mask = mask & is_text.unfold(1, context + 1, 1).all(2)
        return self.detector_module(g_values, mask)

    def _text_mask(self, ids: Tensor) -> Tensor:
        """Which of the ids [N, L] are text and not padding."""
        padding = PaddingTokens.of(self.tokenizer)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, line in zip(mask, ids.cpu().numpy(), strict=True):
            row[slice(*padding.text_span(line))] = True
        return mask
