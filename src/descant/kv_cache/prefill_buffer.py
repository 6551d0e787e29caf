"""What rows read at once that is more than their blocks hold: kept beside them until it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["Aside", "Pair", "grown", "picked"]

Pair = tuple[Tensor, Tensor]  # keys and values, [R, H, S, D] each


@dataclass
class Aside:
    """Rows that were read from their first position on, as they were given but for what they never need."""

    rows: Array  # [N] distinct
    gap: Array  # [N] how many positions behind the head each has left out
    head: int
    content: dict[int, Pair] = field(default_factory=dict)  # layer -> [N, H, S, D]

    def take(self, layer: int, pair: Pair) -> None:
        """Hold a layer's keys and values [N, H, T, D]."""
        if self.gap.any():
            slots = pair[0].shape[2] - int(self.gap.min())
            pair = self._cut(pair, np.arange(len(self.rows)), self.gap, slots)
        self.content[layer] = pair

    def onto(self, whence: Array) -> tuple[Array, Array]:
        """Which of the new rows that continue rows `whence` continue one of these, and which one."""
        into, lines = (whence[:, None] == self.rows).nonzero()
        return into, lines

    def read(self, lines: Array, gap: Array, slots: int) -> dict[int, Pair]:
        """By layer so many slots of some of these rows, if they have a wider gap [N, H, slots, D]."""
        more = gap - self.gap[lines]
        return {layer: self._cut(pair, lines, more, slots) for layer, pair in self.content.items()}

    def _cut(self, pair: Pair, lines: Array, gap: Array, slots: int) -> Pair:
        device, wide = pair[0].device, pair[0].shape[2]
        slot = np.arange(slots)
        index = np.clip(slot + gap[:, None] * (slot >= self.head), 0, max(wide - 1, 0))
        rows, at = (torch.from_numpy(one).to(device) for one in (lines, index))
        keys, values = (one[rows[:, None], :, at].transpose(1, 2) for one in pair)
        return keys, values


def picked(block: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Slots [N, S] of some rows [N] of a block, [N, H, S, D]."""
    _, heads, wide, size = block.shape
    base = rows[:, None, None] * (heads * wide)
    base = base + torch.arange(heads, device=block.device)[:, None] * wide
    # Lines of a flat block are copied whole, several times faster than by an index for every number.
    index = (base + slots[:, None]).flatten()
    return block.view(-1, size).index_select(0, index).view(len(rows), heads, slots.shape[1], size)


def grown(block: Tensor, rows: int, slots: int) -> Tensor:
    """A block with room for so many rows and slots."""
    have, heads, wide, size = block.shape
    if have >= rows and wide >= slots:
        return block
    tall = have if rows <= have else max(rows, have + have // 2)
    larger = block.new_zeros(tall, heads, max(slots, wide), size)
    larger[:have, :, :wide] = block
    return larger
