"""One call of the loop for windows that the encoder has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions
from descant.api.outputs import GenerateOutput
from descant.config.generation_config import GenerationConfig

__all__ = ["GenerateFn", "WindowDecoder", "left_pad"]

GenerateFn = Callable[
    [CallOptions, Mapping[str, Any], bool], Any
]  # the loop: asked, inputs, and whether to stream


@dataclass(frozen=True)
class WindowDecoder:
    """Continues prompts over encoded windows, with the user's processors and stops."""

    generate_fn: GenerateFn
    options: CallOptions
    pad_token_id: int

    def decode(
        self, configs: Sequence[GenerationConfig], states: Tensor, prompts: Sequence[Sequence[int]]
    ) -> GenerateOutput:
        """The record of one call: a config and a prompt for each window [N, positions, size]."""
        asked = replace(self.options, configs=list(configs))
        return self._generate(asked, states, prompts, streamed=True)

    def first_logits(self, states: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
        """What the model itself thinks comes first after each prompt [N, V]."""
        config = GenerationConfig(
            max_new_tokens=1, pad_token_id=self.pad_token_id, return_dict_in_generate=True, output_logits=True
        )
        found: Tensor = self._generate(CallOptions([config]), states, prompts, streamed=False)["logits"][0]
        return found

    def _generate(
        self, asked: CallOptions, states: Tensor, prompts: Sequence[Sequence[int]], streamed: bool
    ) -> GenerateOutput:
        ids, here = left_pad(prompts, self.pad_token_id, states.device)
        given = {"encoder_outputs": states, "decoder_input_ids": ids, "decoder_attention_mask": here}
        record: GenerateOutput = self.generate_fn(asked, given, streamed)
        return record


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one block, aligned at the right, and where it holds tokens [N, W]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    here = torch.zeros_like(ids)
    for line, prompt in enumerate(prompts):
        ids[line, width - len(prompt) :] = torch.tensor(prompt)
        here[line, width - len(prompt) :] = 1
    return ids.to(device), here.to(device)
