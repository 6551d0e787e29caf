"""Token healing: only tokens that agree with what was taken off a prompt's end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, Prompt
from descant.decoding.processors.base import LogitsProcessor, number
from descant.errors import InputError
from descant.tokenization.token_healing import Tail

__all__ = ["HealingLogitsProcessor"]

_NOTHING = Tail()


class HealingLogitsProcessor(LogitsProcessor):
    """Leaves only tokens that agree with the text taken off a prompt, until the new tokens have said it.

    By hand, `Tail.of(tokenizer, ids)` tells how many ids to take off, and `prompt_length` is how
    many are left.
    """

    def __init__(self, tail: Tail, prompt_length: int) -> None:
        if not isinstance(tail, Tail):
            raise InputError("tail", "must be a Tail", tail, "make it with Tail.of(tokenizer, ids)")
        self.healing = tail
        self.prompt = number("prompt_length", prompt_length, 0, whole=True)

    @classmethod
    def columns(cls, config: GenerationConfig, prompt: Prompt) -> dict[str, Any]:  # noqa: ARG003
        """What was taken off the prompt."""
        return {"healing": _NOTHING if prompt.tail is None else prompt.tail}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the tokens that agree."""
        tails: list[Tail] = context.objects("healing")
        # Most lines are known to be through by how many new tokens they have.
        open_ = [line for line, new in enumerate(context.new) if new < len(tails[line])]
        allowed = {
            line: ids for line in open_ if (ids := tails[line].allowed(context.written(line))) is not None
        }
        if not allowed:
            return scores
        banned = torch.zeros(scores.shape, dtype=torch.bool)
        for line, ids in allowed.items():
            banned[line] = True
            banned[line, torch.from_numpy(ids[ids < scores.shape[1]])] = False
        return scores.masked_fill(banned.to(scores.device), -torch.inf)
