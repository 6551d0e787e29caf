"""Thinking: a budget for the tokens of thought before an answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.decoding.processors.lengths import TokenIds, as_id_list, force_tokens
from descant.errors import InputError

__all__ = ["ThinkingBudgetLogitsProcessor"]


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Forces the end of a thought of `thinking_budget` tokens ("budget forcing", Muennighoff et al. 2025).

    Thought begins after the last `thinking_start` in the row, prompt included, or, where there is no such
    sequence, with the first generated token; it is over once `thinking_end` has followed. At the budget the
    tokens of `thinking_end` are forced one after the other, from what part of it the thought already ends
    with. By hand, the first `prompt_length` ids are the prompt.
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
            raise InputError("thinking_end", "must name at least one token", thinking_end)
        self.thinking_start = [] if thinking_start is None else as_id_list(thinking_start)
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:
        """Its budget, and the two sequences as lists."""
        names = ("thinking_start", "thinking_end")
        sequences = {name: list(getattr(config, name, None) or ()) for name in names}
        return {**super().params_from_config(config, prompt), **sequences}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Certainty for the next token of the end where a thought is too long."""
        start, end = context.param("thinking_start"), context.param("thinking_end")
        # One place more than there are tokens, for rows that have none yet.
        tokens = pad(torch.where(context.valid, context.tokens, -1), (0, 1), value=-1)  # [N, L + 1]
        at = torch.arange(tokens.shape[1], device=tokens.device)
        size = (start >= 0).sum(1, keepdim=True)
        last = torch.where(sequence_starts(tokens, start), at, -1).amax(1, keepdim=True)
        begin = torch.where(size > 0, last + size, context.length - context.generated)
        over = (sequence_starts(tokens, end) & (at >= begin)).any(1, keepdim=True)
        thinking = ((size == 0) | (last >= 0)) & ~over
        here = thinking & (context.length - begin >= context.param("thinking_budget"))
        return force_tokens(
            scores, end.gather(1, matched_end_tokens(tokens, end, begin, context.length)), here
        )


def sequence_starts(tokens: Tensor, sequence: Tensor) -> Tensor:
    """Where each line's own sequence [N, W], padded with -1, begins in its tokens [N, L], if not empty."""
    found = (tokens >= 0) & (sequence[:, :1] >= 0)
    for place in range(sequence.shape[1]):
        wanted = sequence[:, place : place + 1]
        there = pad(tokens[:, place:], (0, min(place, tokens.shape[1])), value=-1)
        found &= (there == wanted) | (wanted < 0)
    return found


def matched_end_tokens(tokens: Tensor, end: Tensor, begin: Tensor, length: Tensor) -> Tensor:
    """How many tokens of `end` [N, W], but not all, each line has at its own end, from `begin` on [N, 1]."""
    wide = end.shape[1]
    place = length + torch.arange(1 - wide, 0, device=end.device)  # the last W - 1 places
    tail = tokens.gather(1, place.clamp(min=0))
    count = torch.zeros_like(begin)
    for part in range(1, wide):
        same = (tail[:, wide - 1 - part :] == end[:, :part]).all(1, keepdim=True)
        count = torch.where(same & (length - part >= begin), part, count)
    return count
