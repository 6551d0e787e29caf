"""Decoding of encoded audio windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions
from descant.config.generation_config import GenerationConfig
from descant.models.model_output import GenerateOutput

__all__ = ["GenerateFn", "WindowDecoder", "left_pad"]

# Runs one call with these options and model inputs; the bool says whether to stream.
GenerateFn = Callable[[CallOptions, Mapping[str, Any], bool], Any]


@dataclass(frozen=True)
class WindowDecoder:
    """Continues prompts over encoded windows, with the user's processors and stopping criteria."""

    generate_fn: GenerateFn
    options: CallOptions
    pad_token_id: int

    def decode(
        self, configs: Sequence[GenerationConfig], states: Tensor, prompts: Sequence[Sequence[int]]
    ) -> GenerateOutput:
        """The output of one call, with a config and a prompt for each window [N, positions, size]."""
        options = replace(self.options, configs=list(configs))
        return self._generate(options, states, prompts, streamed=True)

    def first_logits(self, states: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The raw logits after each prompt [N, V]."""
        config = GenerationConfig(
            max_new_tokens=1, pad_token_id=self.pad_token_id, return_dict_in_generate=True, output_logits=True
        )
        logits: Tensor = self._generate(CallOptions([config]), states, prompts, streamed=False)["logits"][0]
        return logits

    def _generate(
        self, options: CallOptions, states: Tensor, prompts: Sequence[Sequence[int]], streamed: bool
    ) -> GenerateOutput:
        ids, mask = left_pad(prompts, self.pad_token_id, states.device)
        inputs = {"encoder_outputs": states, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        output: GenerateOutput = self.generate_fn(options, inputs, streamed)
        return output


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask [N, W]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
