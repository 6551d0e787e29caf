"""The benchmark cases: number and lengths of prompts, and the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["CASES", "Case", "Prompts"]


@dataclass(frozen=True)
class Prompts:
    """Random prompts, padded at the left."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L] 1 where an id is real


@dataclass(frozen=True)
class Case:
    """A batch and a method; both generate() receive the same `arguments`."""

    name: str
    lengths: tuple[int, ...]  # of the prompts
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def equal_lengths(self) -> bool:
        """Whether all prompts have the same length."""
        return len(set(self.lengths)) == 1

    @property
    def greedy(self) -> bool:
        """Whether the method is that of the baseline loop, greedy search."""
        return not self.arguments

    def prompts(self, vocabulary: int) -> Prompts:
        """The prompts of this case, the same in every run."""
        longest = max(self.lengths)
        generator = torch.Generator().manual_seed(len(self.lengths) * 1000 + longest)
        # The first id is the pad token, the last one the end token.
        ids = torch.randint(1, vocabulary - 1, (len(self.lengths), longest), generator=generator)
        mask = (torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]).long()
        return Prompts(ids * mask, mask)


_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("greedy-1", (32,)),
        Case("greedy-16", (32,) * 16),
        Case("ragged-16", tuple(range(2, 33, 2))),
        Case("sample-16", (32,) * 16, _SAMPLING),
        Case("beam-4", (512,), {"num_beams": 4}),
    )
}
