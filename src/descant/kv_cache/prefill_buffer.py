"""What rows read at once that is more than their blocks hold: kept beside them until it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["KVPair", "PrefillBuffer", "gather_slots", "grow_block"]

KVPair = tuple[Tensor, Tensor]  # keys and values, [R, H, S, D] each


@dataclass
class PrefillBuffer:
    """Rows that were read from their first position on, as they were given but for what they never need."""

    rows: Array  # [N] distinct
    num_dropped: Array  # [N] how many positions behind the head each has left out
    num_sinks: int
    layers: dict[int, KVPair] = field(default_factory=dict)  # layer -> [N, H, S, D]

    def write(self, layer: int, pair: KVPair) -> None:
        """Hold a layer's keys and values [N, H, T, D]."""
        if self.num_dropped.any():
            slots = pair[0].shape[2] - int(self.num_dropped.min())
            pair = self._gather(pair, np.arange(len(self.rows)), self.num_dropped, slots)
        self.layers[layer] = pair

    def find_children(self, whence: Array) -> tuple[Array, Array]:
        """Which of the new rows that continue rows `whence` continue one of these, and which one."""
        into, lines = (whence[:, None] == self.rows).nonzero()
        return into, lines

    def read(self, lines: Array, gap: Array, slots: int) -> dict[int, KVPair]:
        """By layer so many slots of some of these rows, if they have a wider gap [N, H, slots, D]."""
        more = gap - self.num_dropped[lines]
        return {layer: self._gather(pair, lines, more, slots) for layer, pair in self.layers.items()}

    def _gather(self, pair: KVPair, lines: Array, gap: Array, slots: int) -> KVPair:
        device, wide = pair[0].device, pair[0].shape[2]
        slot = np.arange(slots)
        index = np.clip(slot + gap[:, None] * (slot >= self.num_sinks), 0, max(wide - 1, 0))
        rows, at = (torch.from_numpy(one).to(device) for one in (lines, index))
        keys, values = (one[rows[:, None], :, at].transpose(1, 2) for one in pair)
        return keys, values


def gather_slots(block: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Slots [N, S] of some rows [N] of a block, [N, H, S, D]."""
    _, heads, wide, size = block.shape
    base = rows[:, None, None] * (heads * wide)
    base = base + torch.arange(heads, device=block.device)[:, None] * wide
    # Lines of a flat block are copied whole, several times faster than by an index for every number.
    index = (base + slots[:, None]).flatten()
    return block.view(-1, size).index_select(0, index).view(len(rows), heads, slots.shape[1], size)


def grow_block(block: Tensor, rows: int, slots: int) -> Tensor:
    """A block with room for so many rows and slots."""
    have, heads, wide, size = block.shape
    if have >= rows and wide >= slots:
        return block
    tall = have if rows <= have else max(rows, have + have // 2)
    larger = block.new_zeros(tall, heads, max(slots, wide), size)
    larger[:have, :, :wide] = block
    return larger
