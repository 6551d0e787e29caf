"""Lengths: no end too early, and fixed tokens at the first and last place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from descant.context import Context
from descant.processors.base import LogitsProcessor, marked, number

__all__ = [
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
]

Ids = int | Sequence[int] | Tensor


def ids_of(value: Ids) -> list[int]:
    """One token id or several as a list."""
    return torch.as_tensor(value).reshape(-1).tolist()


class MinLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out while a row, prompt included, is shorter than `min_length`."""

    def __init__(self, min_length: int, eos_token_id: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.min_length = number("min_length", min_length, 0, whole=True)
        self.eos = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.length < context.param("min_length")
        return scores.masked_fill(marked(scores.shape, context.param("eos")) & early, -torch.inf)


class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Rules the end tokens out until a row has `min_new_tokens` tokens beyond its prompt."""

    def __init__(
        self,
        prompt_length_to_skip: int,
        min_new_tokens: int,
        eos_token_id: Ids,
        device: str = "cpu",  # noqa: ARG002
    ) -> None:
        self.prompt = number("prompt_length_to_skip", prompt_length_to_skip, 0, whole=True)
        self.min_new_tokens = number("min_new_tokens", min_new_tokens, 0, whole=True)
        self.eos = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with no way to end too early."""
        early = context.generated < context.param("min_new_tokens")
        return scores.masked_fill(marked(scores.shape, context.param("eos")) & early, -torch.inf)


def forced(scores: Tensor, ids: Tensor, here: Tensor) -> Tensor:
    """Where `here` [N, 1], certainty for the ids [N, W] and nothing else."""
    mask = marked(scores.shape, ids)
    only = torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
    return torch.where(here, only, scores)


class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Makes `bos_token_id` the token after the decoder's start token."""

    def __init__(self, bos_token_id: int) -> None:
        self.forced_bos_token_id = number("bos_token_id", bos_token_id, 0, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the second place."""
        return forced(scores, context.param("forced_bos_token_id"), context.length == 1)


class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Makes one of `eos_token_id` the last token when a row reaches `max_length`."""

    def __init__(self, max_length: int, eos_token_id: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.limit = number("max_length", max_length, 1, whole=True)
        self.forced_eos_token_id = ids_of(eos_token_id)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty at the last place."""
        return forced(
            scores, context.param("forced_eos_token_id"), context.length == context.param("limit") - 1
        )
