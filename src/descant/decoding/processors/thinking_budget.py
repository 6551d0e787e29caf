"""Thinking budget: limits the number of reasoning tokens before the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, TokenIds, as_id_list, check_number
from descant.decoding.processors.lengths import force_tokens
from descant.errors import InputError

__all__ = ["ThinkingBudgetLogitsProcessor"]


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Forces `thinking_end` after `thinking_budget` tokens (budget forcing, Muennighoff et al. 2025).

    Reasoning starts after the last `thinking_start` in the row, prompt included, or, if that is not set, at
    the first generated token. It ends at the next `thinking_end`. At the budget the tokens of `thinking_end`
    are forced one by one, continuing a partial match at the end of the row. In a direct call, the first
    `prompt_length` ids are the prompt.
    """

    config_fields = ("thinking_budget",)

    def __init__(
        self,
        thinking_budget: int,
        thinking_end: TokenIds,
        thinking_start: TokenIds | None = None,
        prompt_length: int = 0,
    ) -> None:
        self.thinking_budget = check_number("thinking_budget", thinking_budget, 0, integer=True)
        self.thinking_end = as_id_list(thinking_end)
        if not self.thinking_end:
            raise InputError("thinking_end", "must contain at least one token id", thinking_end)
        self.thinking_start = [] if thinking_start is None else as_id_list(thinking_start)
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Return the budget, and the two sequences as lists."""
        names = ("thinking_start", "thinking_end")
        sequences = {name: list(getattr(config, name, None) or ()) for name in names}
        return {**super().params_from_config(config, prompt), **sequences}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Force the next token of `thinking_end` in rows that have used up the budget."""
        start, end = context.param("thinking_start"), context.param("thinking_end")
        # One extra column, for rows without tokens.
        tokens = pad(torch.where(context.valid, context.tokens, -1), (0, 1), value=-1)  # [N, L + 1]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        size = (start >= 0).sum(1, keepdim=True)
        last_start = torch.where(sequence_starts(tokens, start), positions, -1).amax(1, keepdim=True)
        begin = torch.where(size > 0, last_start + size, context.length - context.generated)
        ended = (sequence_starts(tokens, end) & (positions >= begin)).any(1, keepdim=True)
        thinking = ((size == 0) | (last_start >= 0)) & ~ended
        over_budget = thinking & (context.length - begin >= context.param("thinking_budget"))
        return force_tokens(
            scores, end.gather(1, matched_end_tokens(tokens, end, begin, context.length)), over_budget
        )


def sequence_starts(tokens: Tensor, sequence: Tensor) -> Tensor:
    """Mask of the positions in tokens [N, L] where the row's sequence [N, W], padded with -1, starts."""
    matches = (tokens >= 0) & (sequence[:, :1] >= 0)
    for offset in range(sequence.shape[1]):
        expected = sequence[:, offset : offset + 1]
        shifted = pad(tokens[:, offset:], (0, min(offset, tokens.shape[1])), value=-1)
        matches &= (shifted == expected) | (expected < 0)
    return matches


def matched_end_tokens(tokens: Tensor, end: Tensor, begin: Tensor, length: Tensor) -> Tensor:
    """Length of the longest proper prefix of `end` [N, W] that the row ends with, from `begin` on [N, 1]."""
    width = end.shape[1]
    positions = length + torch.arange(1 - width, 0, device=end.device)  # the last W - 1 positions
    tail = tokens.gather(1, positions.clamp(min=0))
    count = torch.zeros_like(begin)
    for size in range(1, width):
        matches = (tail[:, width - 1 - size :] == end[:, :size]).all(1, keepdim=True)
        count = torch.where(matches & (length - size >= begin), size, count)
    return count
