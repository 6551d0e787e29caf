"""Biases: tokens, and sequences of tokens, that are made likelier or less likely."""

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
    """Sequences of token ids as lists, checked to be such and none of them empty."""
    checked = []
    for one in value:
        ids = list(one) if isinstance(one, Sequence) and not isinstance(one, str) else []
        if not ids or any(isinstance(token, bool) or not isinstance(token, Integral) for token in ids):
            raise InputError(name, "must hold sequences of token ids, none of them empty", one)
        if min(ids) < 0:
            raise InputError(name, "must hold token ids >= 0", one)
        checked.append([int(token) for token in ids])
    return checked


def completing_tokens(context: Context, ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Which sequences one more token would complete [N, K], and which token that is [N, K].

    `ids` [N, K, W] are the sequences from the left, `sizes` [N, K] their lengths, below 1 for none.
    """
    last = sizes.clamp(min=1) - 1  # [N, K]
    complete = (sizes > 0) & (sizes <= context.length + 1)
    for back in range(1, min(ids.shape[2], context.tokens.shape[1] + 1)):
        wanted = ids.gather(2, (last - back).clamp(min=0)[:, :, None]).squeeze(2)
        found = context.tokens.gather(1, (context.length - back).clamp(min=0))  # [N, 1]
        complete &= (found == wanted) | (last < back)
    return complete, ids.gather(2, last[:, :, None]).squeeze(2)


class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the token that would complete a sequence; to a single token, always.

    `sequence_bias` maps sequences to biases: `{(10, 45): -2.0, (64,): -7.5}` or, as JSON can have it,
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
        """The sequences, how long each is, and the biases."""
        return _sequence_bias_params(config.sequence_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with the biases of what would be completed."""
        check_max_token_id("sequence_bias", self.max_token_id, scores)
        complete, token = completing_tokens(
            context, context.param("sequence_bias_ids"), context.param("sequence_bias_sizes")
        )
        bias = torch.where(complete, context.param("sequence_bias").to(scores.dtype), 0.0)
        # The biases of a token are summed before its score, as the documented processor does.
        return scores + torch.zeros_like(scores).scatter_add_(1, *_drop_unknown_ids(scores, token, bias))


def _sequence_bias_params(value: Any) -> dict[str, Any]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not pairs:
        must = "must map sequences of token ids to biases"
        raise InputError("sequence_bias", must, value, "write {(10, 45): -2.0} or [[[10, 45], -2.0]]")
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise InputError("sequence_bias", "must hold pairs of a sequence and its bias", value)
    ids = check_sequences("sequence_bias", [pair[0] for pair in pairs])
    biases = {tuple(one): _check_bias("sequence_bias", pair[1]) for one, pair in zip(ids, pairs, strict=True)}
    # Sums of floats depend on their order: single tokens first, as the documented processor does.
    ordered = sorted(biases, key=lambda one: len(one) > 1)
    return {
        "sequence_bias_ids": [list(one) for one in ordered],
        "sequence_bias_sizes": [len(one) for one in ordered],
        "sequence_bias": [biases[one] for one in ordered],
    }


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the scores of single tokens, as the field of that name of the OpenAI API does.

    A bias of some units makes a token likelier or less likely; -100 or -inf rules it out in practice.
    """

    logit_bias: list[float]
    logit_bias_ids: list[int]
    max_token_id = -1

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        vars(self).update(_logit_bias_params(logit_bias))
        self.max_token_id = max(self.logit_bias_ids)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """The tokens and their biases."""
        return _logit_bias_params(config.logit_bias or {})

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with the biases."""
        check_max_token_id("logit_bias", self.max_token_id, scores)
        ids = context.param("logit_bias_ids")
        return scores.scatter_add(
            1, *_drop_unknown_ids(scores, ids, context.param("logit_bias").to(scores.dtype))
        )


def _logit_bias_params(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InputError("logit_bias", "must map token ids to biases", value, "write {50256: -100.0}")
    ids = [one for (one,) in check_sequences("logit_bias", [[token] for token in value])]
    return {"logit_bias_ids": ids, "logit_bias": [_check_bias("logit_bias", bias) for bias in value.values()]}


def _check_bias(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InputError(name, "must hold numbers for biases", value)
    return float(value)


def _drop_unknown_ids(scores: Tensor, ids: Tensor, amounts: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and amounts [N, W] fit to be added to the scores: an id that names no token adds nothing."""
    real = (ids >= 0) & (ids < scores.shape[1])
    return torch.where(real, ids, 0), torch.where(real, amounts, 0.0)


def check_max_token_id(name: str, highest: int, scores: Tensor) -> None:
    """Raise for a token id that the scores have no place for."""
    if highest >= scores.shape[1]:
        raise InputError(name, f"must name tokens below {scores.shape[1]}, the vocabulary", highest)
