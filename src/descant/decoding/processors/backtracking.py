"""Phrase bans: at a place to which a row was cut back, the tokens that led into a phrase there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, vocab_mask

__all__ = ["BacktrackMaskProcessor"]


class BacktrackMaskProcessor(LogitsProcessor):
    """Rules out what a row has taken back at its place, which the strategy keeps in the column `masked`.

    A stage, and not part of the choice: what truncates the distribution has to see what is left.
    """

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Nothing: what it reads is the row's own."""
        return {}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores without those tokens."""
        masked = context.state("masked_tokens")[:, 0]  # [N, W] (host), -1 where there is none
        if not bool((masked >= 0).any()):
            return scores
        return scores.masked_fill(vocab_mask(scores.shape, masked.to(scores.device)), -torch.inf)
