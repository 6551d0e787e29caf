"""Token healing: only tokens that agree with what was taken off a prompt's end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.context import Context, PromptInfo
from descant.decoding.processors.base import LogitsProcessor, check_number
from descant.errors import InputError
from descant.tokenization.token_healing import HealedSuffix

__all__ = ["HealingLogitsProcessor"]

_NO_SUFFIX = HealedSuffix()


class HealingLogitsProcessor(LogitsProcessor):
    """Leaves only tokens that agree with the text taken off a prompt, until the new tokens have said it.

    By hand, `Tail.of(tokenizer, ids)` tells how many ids to take off, and `prompt_length` is how
    many are left.
    """

    def __init__(self, healed_suffix: HealedSuffix, prompt_length: int) -> None:
        if not isinstance(healed_suffix, HealedSuffix):
            raise InputError(
                "healed_suffix", "must be a Tail", healed_suffix, "make it with Tail.of(tokenizer, ids)"
            )
        self.healed_suffix = healed_suffix
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """What was taken off the prompt."""
        return {"healed_suffix": _NO_SUFFIX if prompt.healed_suffix is None else prompt.healed_suffix}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """The scores of the tokens that agree."""
        tails: list[HealedSuffix] = context.object_param("healed_suffix")
        # Most lines are known to be through by how many new tokens they have.
        open_ = [line for line, new in enumerate(context.generated_on_host) if new < len(tails[line])]
        allowed = {
            line: ids
            for line in open_
            if (ids := tails[line].allowed_ids(context.new_tokens(line))) is not None
        }
        if not allowed:
            return scores
        banned = torch.zeros(scores.shape, dtype=torch.bool)
        for line, ids in allowed.items():
            banned[line] = True
            banned[line, torch.from_numpy(ids[ids < scores.shape[1]])] = False
        return scores.masked_fill(banned.to(scores.device), -torch.inf)
