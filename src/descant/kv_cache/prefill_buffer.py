"""Staging buffer for prefills longer than the window."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["KVPair", "PrefillBuffer", "flat_slot_index", "gather_slots", "grow_block"]

KVPair = tuple[Tensor, Tensor]  # keys and values, [R, H, S, D] each


@dataclass
class PrefillBuffer:
    """Uncommitted keys and values of rows written from position 0, minus positions that are never needed."""

    rows: Array  # [N] distinct
    num_dropped: Array  # [N] how many positions after the sinks are left out
    num_sinks: int
    layers: dict[int, KVPair] = field(default_factory=dict)  # layer -> [N, H, S, D]

    def write(self, layer: int, pair: KVPair) -> None:
        """Buffer a layer's keys and values [N, H, T, D]."""
        if self.num_dropped.any():
            slots = pair[0].shape[2] - int(self.num_dropped.min())
            pair = self._gather(pair, np.arange(len(self.rows)), self.num_dropped, slots)
        self.layers[layer] = pair

    def find_children(self, parents: Array) -> tuple[Array, Array]:
        """The new rows whose parent is buffered here, and the buffer index of that parent."""
        children, index = (parents[:, None] == self.rows).nonzero()
        return children, index

    def read(self, index: Array, num_dropped: Array, slots: int) -> dict[int, KVPair]:
        """By layer the first slots [N, H, slots, D] of buffered rows without `num_dropped` positions."""
        more = num_dropped - self.num_dropped[index]
        return {layer: self._gather(pair, index, more, slots) for layer, pair in self.layers.items()}

    def _gather(self, pair: KVPair, index: Array, num_dropped: Array, slots: int) -> KVPair:
        device, width = pair[0].device, pair[0].shape[2]
        slot = np.arange(slots)
        source = np.clip(slot + num_dropped[:, None] * (slot >= self.num_sinks), 0, max(width - 1, 0))
        rows, at = (torch.from_numpy(array).to(device) for array in (index, source))
        keys, values = (tensor[rows[:, None], :, at].transpose(1, 2) for tensor in pair)
        return keys, values


def gather_slots(block: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """The slots [N, S] of rows [N] of a block, [N, H, S, D]."""
    gathered = block.view(-1, block.shape[3]).index_select(0, flat_slot_index(block, rows, slots))
    return gathered.view(len(rows), block.shape[1], slots.shape[1], block.shape[3])


def flat_slot_index(block: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """The index of the slots [N, S] of rows [N] in the flat block [R * H * S, D]."""
    _, heads, width, _ = block.shape
    base = rows[:, None, None] * (heads * width)
    base = base + torch.arange(heads, device=block.device)[:, None] * width
    # index_select on the flat block copies whole vectors, several times faster than advanced indexing.
    return (base + slots[:, None]).flatten()


def grow_block(block: Tensor, rows: int, slots: int) -> Tensor:
    """A block with at least so many rows and slots."""
    old_rows, heads, old_slots, size = block.shape
    if old_rows >= rows and old_slots >= slots:
        return block
    new_rows = old_rows if rows <= old_rows else max(rows, old_rows + old_rows // 2)
    grown = block.new_zeros(new_rows, heads, max(slots, old_slots), size)
    grown[:old_rows, :, :old_slots] = block
    return grown
