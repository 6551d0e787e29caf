"""The static cache: a fixed number of slots per row, allocated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError, NotEnoughMemory, format_bytes
from descant.kv_cache.stores.block_store import Workload, largest
from descant.kv_cache.stores.dense import DenseStore

__all__ = ["StaticStore", "round_up_capacity", "round_up_rows"]

# Capacities for compiled steps are multiples of this, so that one compiled step serves many lengths.
_CAPACITY_STEP = 256

Blocks = dict[int, Tensor]  # by layer [R, H, S, D]


def round_up_rows(rows: int) -> int:
    """The next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def round_up_capacity(capacity: int) -> int:
    """The next multiple of 256 slots."""
    return -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP


class StaticStore(DenseStore):
    """Keys and values [rows, H, capacity, D] per layer, allocated at the first write.

    Position `p` of a row is its slot `p`. A forward sees the slots up to its longest row, as in the dense
    cache. A compiled step writes to the blocks in place (`layer_views`), so its shapes depend only on their
    size. With a `compile_config` the capacity is rounded up to a multiple of 256. `rows` fixes the number
    of rows; without it blocks double when rows run out, the only time their address changes. Commits move
    rows in place.
    """

    capacity: int = 0
    grows = False  # everything is allocated at the start

    def __init__(
        self, capacity: int, rows: int | None = None, compile_config: CompileConfig | None = None
    ) -> None:
        if capacity < 1:
            raise InputError("capacity", "must be >= 1", capacity)
        if rows is not None and rows < 1:
            raise InputError("rows", "must be >= 1 or None", rows)
        super().__init__()
        self._settings = capacity, rows, compile_config
        self.capacity = capacity if compile_config is None else round_up_capacity(capacity)
        self.compile_config = compile_config
        self._max_rows = rows
        self._layer_views: dict[int, tuple[Blocks, Blocks]] = {}

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._check_rows(self._num_rows + rows)
        super().extend(rows)

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit that moves rows in place."""
        self._check_lengths(lengths)
        if parents is not None:
            self._check_rows(len(parents))
        return super().prepare_commit(parents, lengths)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - layers are alike
        """None while the span fits; all slots where only padding exceeds the capacity."""
        if span.read_length <= self.capacity:
            return None
        return VisibleSlots(torch.from_numpy(span.on_host(self._num_rows)[1]), self.capacity)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        if span.read_length <= self.capacity:
            return super().update(layer, key, value, span)
        if isinstance(span.start, int):
            raise self._capacity_error(span.read_length)
        # Rows start at different slots: what exceeds the capacity is padding, and is not written.
        rows, starts = (torch.from_numpy(column) for column in span.on_host(self._num_rows))
        slots = starts[:, None] + torch.arange(span.width)
        index, step = (slots < self.capacity).nonzero(as_tuple=True)
        pair = self._layer_blocks(layer, key, value, self.capacity)
        self._mark_written(span)
        visible = []
        for block, new in zip(pair, (key, value), strict=True):
            device = block.device
            target_rows, target_slots = rows[index].to(device), slots[index, step].to(device)
            block[target_rows, :, target_slots] = new[index.to(device), :, step.to(device)]
            visible.append(block[rows.to(device)])
        return visible[0], visible[1]

    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        self._check_rows(len(rows))
        return super().select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        self._check_rows(len(self) + len(other))
        self._check_lengths(other.lengths)
        super().join(other)

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        super().to(device)
        self._layer_views = {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store."""
        self._check_lengths(state["lengths"])
        super().load(state)

    def count_slots(self, workload: Workload) -> int | None:
        """The slots of the blocks, allocated at once."""
        return self.block_slots(workload.num_fed)

    def block_slots(self, rows: int) -> int:
        """The number of slots of a block for so many rows."""
        return self._block_rows(rows) * self.capacity

    def layer_views(self, rows: int) -> tuple[Blocks, Blocks] | None:
        """Views of the first `rows` rows of every layer's keys and values, to read and write in place.

        Grows the blocks if needed. Rows behind the last one are unused, so a step for a rounded number of
        rows may write there. None before the first write.
        """
        if not self._keys:
            return None
        self._ensure_rows(rows)
        # A step writes one slot of each row, and anywhere in the rows behind the last.
        self._written.mark(np.arange(self._num_rows), self._lengths.numpy() + 1)
        self._written.mark(np.arange(self._num_rows, rows), self.capacity)
        views = self._layer_views.get(rows)
        if views is None:
            keys, values = (
                {layer: blocks[layer][:rows] for layer in sorted(blocks)}
                for blocks in (self._keys, self._values)
            )
            views = self._layer_views[rows] = keys, values
        return views

    def reserve(self, layer: int, like: Tensor) -> None:
        """Allocate the blocks of a layer before its first write, in the heads and dtype of [0, H, 0, D]."""
        self._ensure_capacity(layer, (like, like), 0, 0)

    def clear_blocks(self) -> None:
        """Fill all blocks with zeros."""
        for block in self._all_blocks():
            block.zero_()

    # -------------------------------------------------------------------- blocks
    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block padded to the capacity."""
        if block.shape[2] > self.capacity:
            raise self._capacity_error(block.shape[2])
        return self._padded(block, len(block))

    def _ensure_capacity(
        self, layer: int, like: Sequence[Tensor], slots: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        old = self._keys.get(layer), self._values.get(layer)
        pair = super()._ensure_capacity(layer, like, slots, rows)
        if pair[0] is not old[0] or pair[1] is not old[1]:
            self._layer_views = {}
        return pair

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        if slots > self.capacity:
            raise self._capacity_error(slots)
        if block is None:
            block = like[:0, :, :0]
        elif len(block) >= rows:
            return block
        return self._padded(block, rows)

    def _padded(self, block: Tensor, rows: int) -> Tensor:
        """A block of full size with the content of another, zero elsewhere."""
        num_rows = self._block_rows(rows)
        shape = (num_rows, block.shape[1], self.capacity, block.shape[3])
        # Compiled steps are specialised on inference tensors, so the caller's inference mode must not matter.
        with torch.inference_mode(False):
            try:
                padded = torch.zeros(shape, dtype=block.dtype, device=block.device)
            except (RuntimeError, MemoryError) as error:
                size = prod(shape) * block.element_size()
                message = (
                    f"the static cache of {num_rows} rows of {self.capacity} positions needs blocks of "
                    f"{format_bytes(size)}, which {block.device} cannot allocate: lower `max_cache_len` or "
                    "`batch_size`"
                )
                raise NotEnoughMemory(message, size) from error
        padded[: len(block), :, : block.shape[2]] = block
        return padded

    def _block_rows(self, rows: int) -> int:
        return round_up_rows(max(rows, self._max_rows or 1))

    # -------------------------------------------------------------------- limits
    def _check_rows(self, rows: int) -> None:
        if self._max_rows is not None and rows > self._max_rows:
            raise InputError("rows", f"must be >= the {rows} rows in use", self._max_rows)

    def _check_lengths(self, lengths: Tensor) -> None:
        if largest(lengths) > self.capacity:
            raise self._capacity_error(largest(lengths))

    def _capacity_error(self, positions: int) -> InputError:
        return InputError("capacity", f"must be >= the {positions} positions of a row", self.capacity)
