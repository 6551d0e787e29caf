"""The static cache: as many slots for every row as it will ever have, laid out once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import Reach, Span
from descant.errors import InputError
from descant.kv_cache.dense import DenseCache

__all__ = ["StaticStore", "bucket", "widened"]

# What is compiled for some size is good for every smaller one: sizes come in steps of this many slots.
_STEP = 256

Blocks = dict[int, Tensor]  # by layer, [R, H, S, D]


def bucket(rows: int) -> int:
    """So many rows or more: a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def widened(capacity: int) -> int:
    """So many slots or more: a multiple of 256."""
    return -(-capacity // _STEP) * _STEP


class StaticStore(DenseCache):
    """Keys and values as [rows, heads, capacity, dim] a layer, allocated with the first write and kept.

    Position `p` of a row is its slot `p`. A forward is shown the slots that its rows reach, as by the dense
    cache; a compiled step borrows the blocks as they are (`lend`), and its shape depends on nothing but
    their size. For `compile` the capacity is rounded up to a multiple of 256. With `rows` there is
    room for so many and never for more; without, room for twice as many is made where rows run out, the one
    time when blocks change their address. Commits move rows in place.
    """

    def __init__(self, capacity: int, rows: int | None = None, compile: CompileConfig | None = None) -> None:  # noqa: A002 - what the user calls it
        if capacity < 1:
            raise InputError("capacity", "must be >= 1", capacity)
        if rows is not None and rows < 1:
            raise InputError("rows", "must be >= 1 or None", rows)
        super().__init__()
        self.capacity = capacity if compile is None else widened(capacity)
        self.compile = compile
        self._most = rows
        self._lent: dict[int, tuple[Blocks, Blocks]] = {}

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._allow(self._rows + rows)
        super().extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, moved where it stands."""
        self._check(lengths)
        if parents is not None:
            self._allow(len(parents))
            self._grow(len(parents))
        super().commit(parents, lengths)

    def reach(self, layer: int, span: Span) -> Reach | None:  # type: ignore[override]  # noqa: ARG002 - alike in all
        """None as far as there are slots; all of them where what fills shorter rows up would lie behind."""
        if span.stop <= self.capacity:
            return None
        return Reach(torch.from_numpy(span.on_host(self._rows)[1]), self.capacity)

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        if span.stop <= self.capacity:
            return super().update(layer, key, value, span)
        if isinstance(span.start, int):
            raise self._full(span.stop)
        # Only the longest rows and the widest ones together reach so far: what lies behind is filling.
        places, starts = (torch.from_numpy(one) for one in span.on_host(self._rows))
        at = starts[:, None] + torch.arange(span.width)
        line, step = (at < self.capacity).nonzero(as_tuple=True)
        found = []
        for store, new in ((self._keys, key), (self._values, value)):
            block = self._room(store, layer, new, self.capacity)
            home = block.device
            into, slot = places[line].to(home), at[line, step].to(home)
            block[into, :, slot] = new[line.to(home), :, step.to(home)]
            found.append(block[places.to(home)])
        return found[0], found[1]

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._check(other.lengths)
        super().join(other)

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        super().to(device)
        self._lent = {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self._check(state["lengths"])
        super().load(state)

    def lend(self, rows: int) -> tuple[Blocks, Blocks] | None:
        """The first `rows` lines of the keys and values of every layer, to write and read in place.

        Lines behind the last row hold nothing, so that a step for a round number of rows may write there.
        None before anything was written.
        """
        if not self._keys:
            return None
        self._grow(rows)
        lent = self._lent.get(rows)
        if lent is None:
            keys, values = (
                {layer: store[layer][:rows] for layer in sorted(store)}
                for store in (self._keys, self._values)
            )
            lent = self._lent[rows] = keys, values
        return lent

    # -------------------------------------------------------------------- blocks
    def _empty(self) -> Self:
        return type(self)(self.capacity, self._most, self.compile)

    def _kept(self, block: Tensor) -> Tensor:
        """A block as this cache holds it, with room for what will follow."""
        if block.shape[2] > self.capacity:
            raise self._full(block.shape[2])
        whole = self._new(block, len(block))
        whole[: len(block), :, : block.shape[2]] = block
        return whole

    def _room(self, store: Blocks, layer: int, like: Tensor, slots: int) -> Tensor:
        if slots > self.capacity:
            raise self._full(slots)
        if layer not in store:
            store[layer] = self._new(like, self._rows)
            self._lent = {}
        self._grow(self._rows)
        return store[layer]

    def _new(self, like: Tensor, rows: int) -> Tensor:
        """An empty block."""
        tall = bucket(max(rows, self._most or 1))
        # What a step is compiled for must not depend on whether the caller is in inference mode.
        with torch.inference_mode(False):
            return torch.zeros(
                tall, like.shape[1], self.capacity, like.shape[3], dtype=like.dtype, device=like.device
            )

    def _grow(self, rows: int) -> None:
        """Make room for so many rows where there is less."""
        for store in (self._keys, self._values):
            for layer, block in store.items():
                if len(block) < rows:
                    grown = self._new(block, rows)
                    grown[: len(block)] = block
                    store[layer] = grown
                    self._lent = {}

    # -------------------------------------------------------------------- limits
    def _allow(self, rows: int) -> None:
        if self._most is not None and rows > self._most:
            raise InputError("rows", f"must be >= the {rows} rows in use", self._most)

    def _check(self, lengths: Tensor) -> None:
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.capacity:
            raise self._full(longest)

    def _full(self, positions: int) -> InputError:
        return InputError("capacity", f"must be >= the {positions} positions of a row", self.capacity)
