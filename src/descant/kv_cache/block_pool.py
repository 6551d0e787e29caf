"""The blocks of a paged cache: who holds which, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["BlockPool", "BlockSlab"]

# What grows token by token starts with so many blocks, and grows by a quarter: little is held in vain.
_MIN_GROWTH_BLOCKS = 16


class BlockSlab:
    """Room for a number of blocks: keys [H, slots, D] and values a layer, made when a layer first writes."""

    def __init__(self, blocks: int) -> None:
        self.num_blocks = blocks
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for part in (*self.keys.values(), *self.values.values()))

    def kv_tensors(self) -> Iterator[dict[int, Tensor]]:
        """Its keys and its values."""
        yield self.keys
        yield self.values

    def ensure_capacity(self, store: dict[int, Tensor], layer: int, like: Tensor, block: int) -> Tensor:
        """A layer's tensor with room for all blocks; stale slots must be numbers, so they begin as zeros."""
        slots = self.num_blocks * block
        held = store.get(layer)
        if held is None or held.shape[1] < slots:
            grown = like.new_zeros(like.shape[1], slots, like.shape[3])
            if held is not None:
                grown[:, : held.shape[1]] = held
            held = store[layer] = grown
        return held


class BlockPool:
    """Blocks of `block` slots with a count of the table entries that name each; none is copied to be shared.

    A prompt gets an arena as large as it is, gone when its last block is; what rows write token by token
    goes to the first arena, which grows. Block 7 is a number: `arena[7]` and `local[7]` say where it lies.
    """

    def __init__(self, block: int) -> None:
        self.block_size = block
        self.slabs: dict[int, BlockSlab] = {0: BlockSlab(0)}
        self.ref_counts: Array = np.zeros(0, dtype=np.int64)
        self.slab_of: Array = np.zeros(0, dtype=np.int64)
        self.index_in_slab: Array = np.zeros(0, dtype=np.int64)
        self.block_tables: WeakSet[Any] = WeakSet()  # whoever names blocks
        self.copied_slots = 0  # slots of keys and values copied to part rows, for reports and tests
        self._unused_ids: list[int] = []  # of no block
        self._free_blocks: list[int] = []  # blocks of the first arena that nobody names
        self._live_blocks: dict[int, int] = {}  # arena of a prompt -> how many of its blocks are named
        self._next_slab_id = 1

    @property
    def nbytes(self) -> int:
        """What all arenas take in memory."""
        return sum(arena.nbytes for arena in self.slabs.values())

    @property
    def num_used_blocks(self) -> int:
        """How many blocks are named."""
        return int((self.ref_counts > 0).sum())

    def allocate(self, count: int, contiguous: bool = False) -> list[int]:
        """So many blocks that nobody names, named once now; `together` in an arena of their own."""
        if contiguous:
            number, self._next_slab_id = self._next_slab_id, self._next_slab_id + 1
            self.slabs[number] = BlockSlab(count)
            self._live_blocks[number] = count
            blocks = self._assign_ids(number, range(count))
        else:
            if len(self._free_blocks) < count:
                self._grow(count - len(self._free_blocks))
            blocks = [self._free_blocks.pop() for _ in range(count)]
        self.ref_counts[blocks] = 1
        return blocks

    def incref(self, blocks: Array) -> None:
        """Count further entries that name these blocks."""
        self.ref_counts += np.bincount(blocks, minlength=len(self.ref_counts))

    def decref(self, blocks: Array) -> None:
        """Count entries less; what nobody names any more is free."""
        if not len(blocks):
            return
        counts = np.bincount(blocks, minlength=len(self.ref_counts))
        if (counts > self.ref_counts).any():
            raise RuntimeError("a block was freed twice")
        self.ref_counts -= counts
        for one in np.flatnonzero((counts > 0) & (self.ref_counts == 0)).tolist():
            home = int(self.slab_of[one])
            if home == 0:
                self._free_blocks.append(one)
                continue
            self._unused_ids.append(one)
            self.slab_of[one] = -1
            self._live_blocks[home] -= 1
            if not self._live_blocks[home]:
                del self._live_blocks[home], self.slabs[home]
        if len(self._free_blocks) > 3 * self.slabs[0].num_blocks // 4:
            self._shrink()

    def copy_slots(self, old: int, new: int, slots: int) -> None:
        """Copy the first slots of a block to another, in every layer."""
        source, target = self.slabs[int(self.slab_of[old])], self.slabs[int(self.slab_of[new])]
        first, begin = (
            int(self.index_in_slab[old]) * self.block_size,
            int(self.index_in_slab[new]) * self.block_size,
        )
        for mine, theirs in zip(source.kv_tensors(), target.kv_tensors(), strict=True):
            for layer, held in mine.items():
                room = target.ensure_capacity(theirs, layer, held.unsqueeze(0), self.block_size)
                room[:, begin : begin + slots] = held[:, first : first + slots]
        self.copied_slots += slots

    def check_ref_counts(self) -> None:
        """Raise if a block is counted otherwise than the tables name it, or lies where it cannot."""
        named = np.zeros_like(self.ref_counts)
        for table in self.block_tables:
            named += np.bincount(table.referenced_blocks(), minlength=len(named))
        if (named != self.ref_counts).any():
            wrong = np.flatnonzero(named != self.ref_counts).tolist()
            raise RuntimeError(
                f"blocks {wrong} are named {named[wrong]} times and counted {self.ref_counts[wrong]}"
            )
        idle = sorted([*self._free_blocks, *self._unused_ids])
        if idle != np.flatnonzero(self.ref_counts == 0).tolist():
            raise RuntimeError("what is free is not what nobody names")
        held = {
            number: int((self.ref_counts[self.slab_of == number] > 0).sum()) for number in self._live_blocks
        }
        if held != self._live_blocks or set(self.slabs) != {0, *self._live_blocks}:
            raise RuntimeError("an arena outlives its blocks")

    def _shrink(self) -> None:
        """Give up the end of the first arena, where nobody holds anything of it."""
        arena = self.slabs[0]
        held = self.index_in_slab[(self.slab_of == 0) & (self.ref_counts > 0)]
        blocks = int(held.max()) + 1 if len(held) else 0
        if arena.num_blocks - blocks <= max(_MIN_GROWTH_BLOCKS, arena.num_blocks // 2):
            return  # not worth a copy of what stays
        arena.num_blocks = blocks
        gone = [one for one in self._free_blocks if self.index_in_slab[one] >= blocks]
        self._free_blocks = [one for one in self._free_blocks if self.index_in_slab[one] < blocks]
        self._unused_ids += gone
        self.slab_of[gone] = -1
        for store in arena.kv_tensors():
            for layer, room in list(store.items()):
                if blocks:
                    store[layer] = room[:, : blocks * self.block_size].clone()
                else:
                    del store[layer]

    def _grow(self, count: int) -> None:
        """Add blocks to the first arena; its tensors follow when they are written."""
        arena = self.slabs[0]
        more = max(count, _MIN_GROWTH_BLOCKS, arena.num_blocks // 4)
        self._free_blocks += reversed(self._assign_ids(0, range(arena.num_blocks, arena.num_blocks + more)))
        arena.num_blocks += more

    def _assign_ids(self, arena: int, places: Sequence[int]) -> list[int]:
        """Numbers for blocks that lie at these places of an arena."""
        lacking = len(places) - len(self._unused_ids)
        if lacking > 0:
            first, more = len(self.ref_counts), max(lacking, len(self.ref_counts) // 2)
            self.ref_counts, self.slab_of, self.index_in_slab = (
                np.concatenate((old, np.full(more, empty, dtype=np.int64)))
                for old, empty in ((self.ref_counts, 0), (self.slab_of, -1), (self.index_in_slab, 0))
            )
            self._unused_ids += range(first, first + more)
        numbers = [self._unused_ids.pop() for _ in places]
        self.slab_of[numbers], self.index_in_slab[numbers] = arena, list(places)
        return numbers

    def to(self, device: torch.device | str) -> None:
        """Move all arenas."""
        for arena in self.slabs.values():
            for store in arena.kv_tensors():
                for layer, held in store.items():
                    store[layer] = held.to(device)
