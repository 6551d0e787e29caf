"""Guidance: towards what a prompt says and away from what is said without it."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.errors import InputError
from descant.processors.base import LogitsProcessor, number

__all__ = ["ClassifierFreeGuidanceLogitsProcessor"]


class ClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Classifier-free guidance over a batch in halves, with the prompt and without (Ho and Salimans 2022).

    It has half as many lines as it is given, so it is only for calls by hand, as in MusicGen (Copet et
    al. 2023). A `guidance_scale` above 1 goes beyond what the prompt alone says.
    """

    def __init__(self, guidance_scale: float) -> None:
        if number("guidance_scale", guidance_scale, 1.0) <= 1:
            raise InputError("guidance_scale", "must be > 1", guidance_scale)
        self.guidance_scale = float(guidance_scale)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [N, V] from those with the prompt and, below them, those without [2 N, V]."""
        if scores.shape[0] != 2 * input_ids.shape[0]:
            must = f"must have {2 * input_ids.shape[0]} lines, two for each of `input_ids`"
            raise InputError("scores", must, scores, "give those with the prompt first, then those without")
        conditional, plain = scores.chunk(2)
        guided = plain + (conditional - plain) * self.guidance_scale
        return torch.where(conditional == plain, plain, guided)  # ruled out in both, so ruled out
