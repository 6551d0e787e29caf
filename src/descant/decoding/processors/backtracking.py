"""Mask of the tokens that a backtracking strategy has retracted at the current position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, vocab_mask

__all__ = ["BacktrackMaskProcessor"]


class BacktrackMaskProcessor(LogitsProcessor):
    """Masks the tokens a row has retracted at its position, read from the column `masked_tokens`.

    This is a processor and not part of selection, because warpers must see the remaining distribution.
    """

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return no parameters: the mask is row state."""
        return {}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the retracted tokens."""
        masked = context.state("masked_tokens")[:, 0]  # [N, W] (host), padded with -1
        if not bool((masked >= 0).any()):
            return scores
        return scores.masked_fill(vocab_mask(scores.shape, masked.to(scores.device)), -torch.inf)
