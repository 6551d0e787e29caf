"""The models that the doctor runs, and random prompts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from descant.decoding.processors.base import as_id_list

__all__ = ["LAW_LENGTHS", "PaddedPrompts", "Subject", "logit_rounding", "token_prompts"]

LAW_LENGTHS: Final = (3, 17, 9, 30)  # of the prompts of most laws
_MIN_TOLERANCE: Final = 1e-4
_NUM_ROUNDINGS: Final = 4  # that may add up in a comparison


@dataclass(frozen=True)
class Subject:
    """A model, how to load it in another dtype, and how far rounding changes its logits."""

    name: str
    model: Any
    load: Callable[[str], Any]  # by the name of a dtype
    rounding: float | None = None  # None: unknown
    folder: str | None = None  # or a name on the Hub; None: the tiny model, which has none

    @property
    def tolerance(self) -> float:
        """How far logits may differ in a law."""
        return max(_MIN_TOLERANCE, _NUM_ROUNDINGS * (self.rounding or 0.0))

    @property
    def is_half(self) -> bool:
        """Whether its weights are in half precision, for which no law is promised."""
        return self.model.dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PaddedPrompts:
    """Prompts of one call, padded at the left."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 where an id is real

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], model: Any, pad: int) -> PaddedPrompts:
        """Prompts of any lengths on the device of a model."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        real = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        mask = (torch.arange(width) >= width - real).long()
        return cls(ids.to(model.device), mask.to(model.device))


def token_prompts(model: Any, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens of these lengths, none of them special; the second half repeats the first."""
    config = model.generation_config
    special = {0, 1, 2}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        special.update(as_id_list(getattr(config, name, None)))
    rng, size = random.Random(seed), model.config.get_text_config(decoder=True).vocab_size
    prompts = []
    for length in lengths:
        half: list[int] = []
        while len(half) < (length + 1) // 2:
            token = rng.randrange(size)
            half += [] if token in special else [token]
        prompts.append((half * 2)[:length])
    return prompts


@torch.no_grad()
def logit_rounding(model: Any) -> float:
    """How far the logits after a prompt differ between plain forwards of a model: alone, padded, repeated.

    No part of Descant is used, so this is what the laws cannot ask to be smaller.
    """
    if model.config.is_encoder_decoder:
        return 0.0
    largest, width = 0.0, max(LAW_LENGTHS)
    for prompt in token_prompts(model, LAW_LENGTHS):
        ids = torch.tensor([prompt], device=model.device)
        padded = torch.tensor([prompt + prompt[:1] * (width - len(prompt))], device=model.device)
        alone = model(input_ids=ids).logits[0, -1].float()
        for other in (ids.repeat(4, 1), padded):
            logits = model(input_ids=other).logits[0, len(prompt) - 1].float()
            largest = max(largest, float((logits - alone).abs().max()))
    return largest
