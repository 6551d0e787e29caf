"""Penalties: what has been said counts against saying it again."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.context import Context
from descant.errors import InputError
from descant.processors.base import LogitsProcessor, marked, number

__all__ = ["RepetitionPenaltyLogitsProcessor"]


class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Makes tokens already seen less likely (Keskar et al. 2019): scores / penalty, or * penalty below 0."""

    def __init__(self, penalty: float) -> None:
        if number("penalty", penalty, 0.0) <= 0:
            raise InputError("penalty", "must be > 0", penalty, "1.0 means no penalty")
        self.repetition_penalty = float(penalty)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores with every token of the row, prompt included and padding not, made less likely."""
        penalty = context.param("repetition_penalty").to(scores.dtype)
        seen = marked(scores.shape, torch.where(context.valid, context.tokens, -1))
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
