"""The blocks of a paged cache: who holds which, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["Arena", "Pool"]

# What grows token by token starts with so many blocks, and grows by a quarter: little is held in vain.
_FIRST = 16


class Arena:
    """Room for a number of blocks: keys [H, slots, D] and values a layer, made when a layer first writes."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for part in (*self.keys.values(), *self.values.values()))

    def stores(self) -> Iterator[dict[int, Tensor]]:
        """Its keys and its values."""
        yield self.keys
        yield self.values

    def room(self, store: dict[int, Tensor], layer: int, like: Tensor, block: int) -> Tensor:
        """A layer's tensor with room for all blocks; stale slots must be numbers, so they begin as zeros."""
        slots = self.blocks * block
        held = store.get(layer)
        if held is None or held.shape[1] < slots:
            grown = like.new_zeros(like.shape[1], slots, like.shape[3])
            if held is not None:
                grown[:, : held.shape[1]] = held
            held = store[layer] = grown
        return held


class Pool:
    """Blocks of `block` slots with a count of the table entries that name each; none is copied to be shared.

    A prompt gets an arena as large as it is, gone when its last block is; what rows write token by token
    goes to the first arena, which grows. Block 7 is a number: `arena[7]` and `local[7]` say where it lies.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.arenas: dict[int, Arena] = {0: Arena(0)}
        self.refs: Array = np.zeros(0, dtype=np.int64)
        self.arena: Array = np.zeros(0, dtype=np.int64)
        self.local: Array = np.zeros(0, dtype=np.int64)
        self.tables: WeakSet[Any] = WeakSet()  # whoever names blocks
        self.moved = 0  # slots of keys and values copied to part rows, for reports and tests
        self._numbers: list[int] = []  # of no block
        self._free: list[int] = []  # blocks of the first arena that nobody names
        self._left: dict[int, int] = {}  # arena of a prompt -> how many of its blocks are named
        self._next = 1

    @property
    def nbytes(self) -> int:
        """What all arenas take in memory."""
        return sum(arena.nbytes for arena in self.arenas.values())

    @property
    def used(self) -> int:
        """How many blocks are named."""
        return int((self.refs > 0).sum())

    def take(self, count: int, together: bool = False) -> list[int]:
        """So many blocks that nobody names, named once now; `together` in an arena of their own."""
        if together:
            number, self._next = self._next, self._next + 1
            self.arenas[number] = Arena(count)
            self._left[number] = count
            blocks = self._numbered(number, range(count))
        else:
            if len(self._free) < count:
                self._grow(count - len(self._free))
            blocks = [self._free.pop() for _ in range(count)]
        self.refs[blocks] = 1
        return blocks

    def name(self, blocks: Array) -> None:
        """Count further entries that name these blocks."""
        self.refs += np.bincount(blocks, minlength=len(self.refs))

    def drop(self, blocks: Array) -> None:
        """Count entries less; what nobody names any more is free."""
        if not len(blocks):
            return
        counts = np.bincount(blocks, minlength=len(self.refs))
        if (counts > self.refs).any():
            raise RuntimeError("a block was freed twice")
        self.refs -= counts
        for one in np.flatnonzero((counts > 0) & (self.refs == 0)).tolist():
            home = int(self.arena[one])
            if home == 0:
                self._free.append(one)
                continue
            self._numbers.append(one)
            self.arena[one] = -1
            self._left[home] -= 1
            if not self._left[home]:
                del self._left[home], self.arenas[home]
        if len(self._free) > 3 * self.arenas[0].blocks // 4:
            self._shrink()

    def copy(self, old: int, new: int, slots: int) -> None:
        """Copy the first slots of a block to another, in every layer."""
        source, target = self.arenas[int(self.arena[old])], self.arenas[int(self.arena[new])]
        first, begin = int(self.local[old]) * self.block, int(self.local[new]) * self.block
        for mine, theirs in zip(source.stores(), target.stores(), strict=True):
            for layer, held in mine.items():
                room = target.room(theirs, layer, held.unsqueeze(0), self.block)
                room[:, begin : begin + slots] = held[:, first : first + slots]
        self.moved += slots

    def check(self) -> None:
        """Raise if a block is counted otherwise than the tables name it, or lies where it cannot."""
        named = np.zeros_like(self.refs)
        for table in self.tables:
            named += np.bincount(table.named(), minlength=len(named))
        if (named != self.refs).any():
            wrong = np.flatnonzero(named != self.refs).tolist()
            raise RuntimeError(
                f"blocks {wrong} are named {named[wrong]} times and counted {self.refs[wrong]}"
            )
        idle = sorted([*self._free, *self._numbers])
        if idle != np.flatnonzero(self.refs == 0).tolist():
            raise RuntimeError("what is free is not what nobody names")
        held = {number: int((self.refs[self.arena == number] > 0).sum()) for number in self._left}
        if held != self._left or set(self.arenas) != {0, *self._left}:
            raise RuntimeError("an arena outlives its blocks")

    def _shrink(self) -> None:
        """Give up the end of the first arena, where nobody holds anything of it."""
        arena = self.arenas[0]
        held = self.local[(self.arena == 0) & (self.refs > 0)]
        blocks = int(held.max()) + 1 if len(held) else 0
        if arena.blocks - blocks <= max(_FIRST, arena.blocks // 2):
            return  # not worth a copy of what stays
        arena.blocks = blocks
        gone = [one for one in self._free if self.local[one] >= blocks]
        self._free = [one for one in self._free if self.local[one] < blocks]
        self._numbers += gone
        self.arena[gone] = -1
        for store in arena.stores():
            for layer, room in list(store.items()):
                if blocks:
                    store[layer] = room[:, : blocks * self.block].clone()
                else:
                    del store[layer]

    def _grow(self, count: int) -> None:
        """Add blocks to the first arena; its tensors follow when they are written."""
        arena = self.arenas[0]
        more = max(count, _FIRST, arena.blocks // 4)
        self._free += reversed(self._numbered(0, range(arena.blocks, arena.blocks + more)))
        arena.blocks += more

    def _numbered(self, arena: int, places: Sequence[int]) -> list[int]:
        """Numbers for blocks that lie at these places of an arena."""
        lacking = len(places) - len(self._numbers)
        if lacking > 0:
            first, more = len(self.refs), max(lacking, len(self.refs) // 2)
            self.refs, self.arena, self.local = (
                np.concatenate((old, np.full(more, empty, dtype=np.int64)))
                for old, empty in ((self.refs, 0), (self.arena, -1), (self.local, 0))
            )
            self._numbers += range(first, first + more)
        numbers = [self._numbers.pop() for _ in places]
        self.arena[numbers], self.local[numbers] = arena, list(places)
        return numbers

    def to(self, device: torch.device | str) -> None:
        """Move all arenas."""
        for arena in self.arenas.values():
            for store in arena.stores():
                for layer, held in store.items():
                    store[layer] = held.to(device)
