"""Token healing: restricts the first tokens to those that reproduce the removed end of the prompt."""

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
    """Allows only tokens consistent with the text removed from the prompt, until it is reproduced.

    In a direct call, `HealedSuffix.from_prompt(tokenizer, ids)` gives the ids to remove, and `prompt_length`
    is the number of ids that remain.
    """

    def __init__(self, healed_suffix: HealedSuffix, prompt_length: int) -> None:
        if not isinstance(healed_suffix, HealedSuffix):
            raise InputError(
                "healed_suffix",
                "must be a HealedSuffix",
                healed_suffix,
                "create it with HealedSuffix.from_prompt(tokenizer, ids)",
            )
        self.healed_suffix = healed_suffix
        self.prompt_length = check_number("prompt_length", prompt_length, 0, integer=True)

    @classmethod
    def params_from_config(cls, config: GenerationConfig, prompt: PromptInfo) -> dict[str, Any]:  # noqa: ARG003
        """Return the text removed from the prompt."""
        return {"healed_suffix": _NO_SUFFIX if prompt.healed_suffix is None else prompt.healed_suffix}

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Mask the tokens that do not match the removed text."""
        suffixes: list[HealedSuffix] = context.object_param("healed_suffix")
        # The number of generated tokens already excludes most rows.
        unfinished = [
            row for row, count in enumerate(context.generated_on_host) if count < len(suffixes[row])
        ]
        allowed = {
            row: ids
            for row in unfinished
            if (ids := suffixes[row].allowed_ids(context.new_tokens(row))) is not None
        }
        if not allowed:
            return scores
        banned = torch.zeros(scores.shape, dtype=torch.bool)
        for row, ids in allowed.items():
            banned[row] = True
            banned[row, torch.from_numpy(ids[ids < scores.shape[1]])] = False
        return scores.masked_fill(banned.to(scores.device), -torch.inf)
