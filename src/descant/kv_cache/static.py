"""The static cache: as many slots for every row as it will ever have, laid out once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.dense import DenseStore

__all__ = ["StaticStore", "round_up_capacity", "round_up_rows"]

# What is compiled for some size is good for every smaller one: sizes come in steps of this many slots.
_CAPACITY_STEP = 256

Blocks = dict[int, Tensor]  # by layer, [R, H, S, D]


def round_up_rows(rows: int) -> int:
    """So many rows or more: a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def round_up_capacity(capacity: int) -> int:
    """So many slots or more: a multiple of 256."""
    return -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP


class StaticStore(DenseStore):
    """Keys and values as [rows, heads, capacity, dim] a layer, allocated with the first write and kept.

    Position `p` of a row is its slot `p`. A forward is shown the slots that its rows reach, as by the dense
    cache; a compiled step borrows the blocks as they are (`lend`), and its shape depends on nothing but
    their size. For `compile` the capacity is rounded up to a multiple of 256. With `rows` there is
    room for so many and never for more; without, room for twice as many is made where rows run out, the one
    time when blocks change their address. Commits move rows in place.
    """

    def __init__(
        self, capacity: int, rows: int | None = None, compile_config: CompileConfig | None = None
    ) -> None:
        if capacity < 1:
            raise InputError("capacity", "must be >= 1", capacity)
        if rows is not None and rows < 1:
            raise InputError("rows", "must be >= 1 or None", rows)
        super().__init__()
        self.capacity = capacity if compile_config is None else round_up_capacity(capacity)
        self.compile_config = compile_config
        self._max_rows = rows
        self._layer_views: dict[int, tuple[Blocks, Blocks]] = {}

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._check_rows(self._num_rows + rows)
        super().extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, moved where it stands."""
        self._check_lengths(lengths)
        if parents is not None:
            self._check_rows(len(parents))
            self._grow_blocks(len(parents))
        super().commit(parents, lengths)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # type: ignore[override]  # noqa: ARG002 - alike in all
        """None as far as there are slots; all of them where what fills shorter rows up would lie behind."""
        if span.read_length <= self.capacity:
            return None
        return VisibleSlots(torch.from_numpy(span.on_host(self._num_rows)[1]), self.capacity)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        if span.read_length <= self.capacity:
            return super().update(layer, key, value, span)
        if isinstance(span.start, int):
            raise self._capacity_error(span.read_length)
        # Only the longest rows and the widest ones together reach so far: what lies behind is filling.
        places, starts = (torch.from_numpy(one) for one in span.on_host(self._num_rows))
        at = starts[:, None] + torch.arange(span.width)
        line, step = (at < self.capacity).nonzero(as_tuple=True)
        found = []
        for store, new in ((self._keys, key), (self._values, value)):
            block = self._ensure_capacity(store, layer, new, self.capacity)
            home = block.device
            into, slot = places[line].to(home), at[line, step].to(home)
            block[into, :, slot] = new[line.to(home), :, step.to(home)]
            found.append(block[places.to(home)])
        return found[0], found[1]

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._check_lengths(other.lengths)
        super().join(other)

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        super().to(device)
        self._layer_views = {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self._check_lengths(state["lengths"])
        super().load(state)

    def layer_views(self, rows: int) -> tuple[Blocks, Blocks] | None:
        """The first `rows` lines of the keys and values of every layer, to write and read in place.

        Lines behind the last row hold nothing, so that a step for a round number of rows may write there.
        None before anything was written.
        """
        if not self._keys:
            return None
        self._grow_blocks(rows)
        lent = self._layer_views.get(rows)
        if lent is None:
            keys, values = (
                {layer: store[layer][:rows] for layer in sorted(store)}
                for store in (self._keys, self._values)
            )
            lent = self._layer_views[rows] = keys, values
        return lent

    # -------------------------------------------------------------------- blocks
    def _make_empty(self) -> Self:
        return type(self)(self.capacity, self._max_rows, self.compile_config)

    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block as this cache holds it, with room for what will follow."""
        if block.shape[2] > self.capacity:
            raise self._capacity_error(block.shape[2])
        whole = self._allocate(block, len(block))
        whole[: len(block), :, : block.shape[2]] = block
        return whole

    def _ensure_capacity(self, store: Blocks, layer: int, like: Tensor, slots: int) -> Tensor:
        if slots > self.capacity:
            raise self._capacity_error(slots)
        if layer not in store:
            store[layer] = self._allocate(like, self._num_rows)
            self._layer_views = {}
        self._grow_blocks(self._num_rows)
        return store[layer]

    def _allocate(self, like: Tensor, rows: int) -> Tensor:
        """An empty block."""
        tall = round_up_rows(max(rows, self._max_rows or 1))
        # What a step is compiled for must not depend on whether the caller is in inference mode.
        with torch.inference_mode(False):
            return torch.zeros(
                tall, like.shape[1], self.capacity, like.shape[3], dtype=like.dtype, device=like.device
            )

    def _grow_blocks(self, rows: int) -> None:
        """Make room for so many rows where there is less."""
        for store in (self._keys, self._values):
            for layer, block in store.items():
                if len(block) < rows:
                    grown = self._allocate(block, rows)
                    grown[: len(block)] = block
                    store[layer] = grown
                    self._layer_views = {}

    # -------------------------------------------------------------------- limits
    def _check_rows(self, rows: int) -> None:
        if self._max_rows is not None and rows > self._max_rows:
            raise InputError("rows", f"must be >= the {rows} rows in use", self._max_rows)

    def _check_lengths(self, lengths: Tensor) -> None:
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.capacity:
            raise self._capacity_error(longest)

    def _capacity_error(self, positions: int) -> InputError:
        return InputError("capacity", f"must be >= the {positions} positions of a row", self.capacity)
