"""Bans: tokens that are never chosen, or not at the beginning."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.context import Context
from descant.processors.base import LogitsProcessor, marked, number
from descant.processors.lengths import Ids, ids_of

__all__ = ["SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"]


class SuppressTokensLogitsProcessor(LogitsProcessor):
    """Rules tokens out everywhere."""

    def __init__(self, suppress_tokens: Ids, device: str = "cpu") -> None:  # noqa: ARG002
        self.suppress_tokens = ids_of(suppress_tokens)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens."""
        return scores.masked_fill(marked(scores.shape, context.param("suppress_tokens")), -torch.inf)


class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Rules tokens out at one place, `begin_index`: the first that the model may choose freely."""

    def __init__(self, begin_suppress_tokens: Ids, begin_index: int, device: str = "cpu") -> None:  # noqa: ARG002
        self.begin_suppress_tokens = ids_of(begin_suppress_tokens)
        self.begin_index = number("begin_index", begin_index, 0, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens at that place."""
        here = context.length == context.param("begin_index")
        return scores.masked_fill(
            marked(scores.shape, context.param("begin_suppress_tokens")) & here, -torch.inf
        )
