"""Biases on single tokens and on token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor
from descant.errors import InputError

__all__ = ["LogitBiasLogitsProcessor", "SequenceBiasLogitsProcessor", "check_sequences", "completing_tokens"]


def check_sequences(name: str, value: Sequence[Any]) -> list[list[int]]:
    """Return the sequences of token ids as lists; raise if one is empty or invalid."""
    checked = []
    for sequence in value:
        ids = list(sequence) if isinstance(sequence, Sequence) and not isinstance(sequence, str) else []
        if not ids or any(isinstance(token, bool) or not isinstance(token, Integral) for token in ids):
            raise InputError(name, "must contain non-empty sequences of token ids", sequence)
        if min(ids) < 0:
            raise InputError(name, "must contain token ids >= 0", sequence)
        checked.append([int(token) for token in ids])
    return checked


def completing_tokens(context: Context, ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return which sequences one more token would complete [N, K], and that token [N, K].

    `ids` [N, K, W] are the sequences, padded on the right; `sizes` [N, K] are their lengths, 0 if unused.
    """
    last = sizes.clamp(min=1) - 1  # [N, K]
    complete = (sizes > 0) & (sizes <= context.length + 1)
    for back in range(1, min(ids.shape[2], context.tokens.shape[1] + 1)):
        expected = ids.gather(2, (last - back).clamp(min=0)[:, :, None]).squeeze(2)
        actual = context.tokens.gather(1, (context.length - back).clamp(min=0))  # [N, 1]
        complete &= (actual == expected) | (last < back)
    return complete, ids.gather(2, last[:, :, None]).squeeze(2)


class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the token that would complete a sequence; a single token is always biased.

    `sequence_bias` maps sequences to biases: `{(10, 45): -2.0, (64,): -7.5}`, or the JSON form
    `[[[10, 45], -2.0], [[64], -7.5]]`.
    """

    sequence_bias: list[float]
    sequence_bias_ids: list[list[int]]
    sequence_bias_sizes: list[int]
    max_token_id = -1

    def __init__(self, sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any]) -> None:
        vars(self).update(_sequence_bias_params(sequence_bias))
        self.max_token_id = max(map(max, self.sequence_bias_ids))

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the sequences, their lengths and their biases."""
        return _sequence_bias_params(config.sequence_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Add the biases of the sequences that would be completed."""
        check_max_token_id("sequence_bias", self.max_token_id, scores)
        complete, token = completing_tokens(
            context, context.param("sequence_bias_ids"), context.param("sequence_bias_sizes")
        )
        bias = torch.where(complete, context.param("sequence_bias").to(scores.dtype), 0.0)
        # transformers sums the biases of a token before it adds them to the score.
        return scores + torch.zeros_like(scores).scatter_add_(1, *_drop_unknown_ids(scores, token, bias))


def _sequence_bias_params(value: Any) -> dict[str, Any]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not pairs:
        must = "must map sequences of token ids to biases"
        raise InputError("sequence_bias", must, value, "write {(10, 45): -2.0} or [[[10, 45], -2.0]]")
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise InputError("sequence_bias", "must contain pairs of a sequence and its bias", value)
    ids = check_sequences("sequence_bias", [pair[0] for pair in pairs])
    biases = {
        tuple(sequence): _check_bias("sequence_bias", pair[1])
        for sequence, pair in zip(ids, pairs, strict=True)
    }
    # Float sums depend on the order: single tokens first, as in transformers.
    ordered = sorted(biases, key=lambda sequence: len(sequence) > 1)
    return {
        "sequence_bias_ids": [list(sequence) for sequence in ordered],
        "sequence_bias_sizes": [len(sequence) for sequence in ordered],
        "sequence_bias": [biases[sequence] for sequence in ordered],
    }


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the scores of single tokens, like the OpenAI API's `logit_bias`.

    -100 or -inf effectively bans a token.
    """

    logit_bias: list[float]
    logit_bias_ids: list[int]
    max_token_id = -1

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        vars(self).update(_logit_bias_params(logit_bias))
        self.max_token_id = max(self.logit_bias_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the tokens and their biases."""
        return _logit_bias_params(config.logit_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Add the biases."""
        check_max_token_id("logit_bias", self.max_token_id, scores)
        ids = context.param("logit_bias_ids")
        return scores.scatter_add(
            1, *_drop_unknown_ids(scores, ids, context.param("logit_bias").to(scores.dtype))
        )


def _logit_bias_params(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InputError("logit_bias", "must map token ids to biases", value, "write {50256: -100.0}")
    ids = [token_id for (token_id,) in check_sequences("logit_bias", [[token] for token in value])]
    return {"logit_bias_ids": ids, "logit_bias": [_check_bias("logit_bias", bias) for bias in value.values()]}


def _check_bias(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InputError(name, "must have numbers as biases", value)
    return float(value)


def _drop_unknown_ids(scores: Tensor, ids: Tensor, amounts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and amounts [N, W] for a scatter-add; an id out of range adds 0."""
    known = (ids >= 0) & (ids < scores.shape[1])
    return torch.where(known, ids, 0), torch.where(known, amounts, 0.0)


def check_max_token_id(name: str, max_token_id: int, scores: Tensor) -> None:
    """Raise if a token id is outside the vocabulary of the scores."""
    if max_token_id >= scores.shape[1]:
        raise InputError(
            name, f"must have token ids below {scores.shape[1]}, the vocabulary size", max_token_id
        )
