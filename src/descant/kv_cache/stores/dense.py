"""The dense cache: one contiguous block of slots per row, grown as needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.attention.packed_span import PackedGroup, PackedSpan
from descant.kv_cache.stores.block_store import BlockStore, Workload

__all__ = ["DenseStore"]

# Blocks grow by an eighth, and at least by so many slots: attention reads the whole block in every step, so
# an occasional copy is cheap.
_MIN_GROWTH = 16
# Where so few slots are missing to the expected length, blocks grow to it at once.
_LAST_GROWTH = 64


class DenseStore(BlockStore):
    """Keys and values [R, H, S, D] per layer; position `p` of a row is its slot `p`.

    Rows with a common ancestor already hold the same prefix, so only the slots after it are copied: beam
    search never copies the prompt. Blocks do not grow beyond `expected_length` slots unless a row does.
    """

    is_padded = True

    def __init__(self, expected_length: int | None = None) -> None:
        super().__init__(expected_length)
        self._expected_length = expected_length
        self._marked_span: KVSpan | None = None  # the last span that was marked as written
        self._index_by_device: dict[torch.device, tuple[KVSpan, Tensor, Tensor]] = {}

    def count_slots(self, workload: Workload) -> int | None:
        """The slots of the rows of a workload; None: not known without running it."""
        return workload.num_fed * workload.final_length

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        self._write(layer, key, value, span)
        if span.rows is None:
            return self._first_slots(layer, span.read_length)
        if span.is_first_write:
            return key, value
        rows, stop = self._write_index(span, key.device)[0], span.read_length
        return self._keys[layer][rows, :, :stop], self._values[layer][rows, :, :stop]

    def _write(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> None:
        if span is not self._marked_span:
            self._mark_written(span)
        keys, values = self._layer_blocks(layer, key, value, span.read_length)
        if span.rows is None and isinstance(span.start, int):
            # `narrow` takes half the time of a subscript.
            self._used_rows(keys).narrow(2, span.start, span.width).copy_(key)
            self._used_rows(values).narrow(2, span.start, span.width).copy_(value)
        else:
            rows, at = self._write_index(span, key.device)
            keys[rows[:, None], :, at] = key.transpose(1, 2)
            values[rows[:, None], :, at] = value.transpose(1, 2)

    def write_packed(self, layer: int, key: Tensor, value: Tensor, span: PackedSpan) -> None:
        """Write the keys and values [1, H, P, D] of the tokens of several rows."""
        keys, values = self.blocks_for_write(layer, key, value, span)
        if span.rectangle is not None:
            rows, slots = span.rectangle
            shape = rows.stop - rows.start, slots.stop - slots.start
            keys[rows, :, slots] = key[0].unflatten(1, shape).transpose(0, 1)
            values[rows, :, slots] = value[0].unflatten(1, shape).transpose(0, 1)
            return
        index = span.memo.get(key.device)
        if index is None:
            host = torch.from_numpy(np.stack((span.rows[span.token_rows], span.positions)))
            index = span.memo[key.device] = host.to(key.device, non_blocking=True).unbind(0)
        keys[index[0], :, index[1]] = key[0].transpose(0, 1)
        values[index[0], :, index[1]] = value[0].transpose(0, 1)

    def blocks_for_write(
        self, layer: int, key: Tensor, value: Tensor, span: PackedSpan
    ) -> tuple[Tensor, Tensor]:
        """The blocks [R, H, S, D] of a layer, with room for keys and values that are written to them next."""
        if "is_marked" not in span.memo:
            self._written.mark(span.rows, span.starts + span.widths)
            span.memo["is_marked"] = True
        return self._layer_blocks(layer, key, value, span.read_length)

    def read_group(self, layer: int, group: PackedGroup) -> tuple[Tensor, Tensor]:
        """The keys and values [G, H, S, D] of a group of rows; a view if they are consecutive."""
        keys, values, stop = self._keys[layer], self._values[layer], group.num_slots
        first, count = int(group.rows[0]), len(group.rows)
        if int(group.rows[-1]) - first == count - 1 and "is_scattered" not in group.memo:
            if count < 3 or bool((np.diff(group.rows) == 1).all()):
                return keys[first : first + count, :, :stop], values[first : first + count, :, :stop]
            group.memo["is_scattered"] = True
        if keys.device not in group.memo:
            group.memo[keys.device] = torch.from_numpy(group.rows).to(keys.device, non_blocking=True)
        rows = group.memo[keys.device]
        return keys[:, :, :stop].index_select(0, rows), values[:, :, :stop].index_select(0, rows)

    def _layer_blocks(self, layer: int, key: Tensor, value: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """The layer's blocks, with capacity for all rows and so many slots."""
        keys, values = self._keys.get(layer), self._values.get(layer)
        if (
            keys is None
            or values is None
            or min(keys.shape[2], values.shape[2]) < slots
            or min(keys.shape[0], values.shape[0]) < self._num_rows
        ):
            return self._ensure_capacity(layer, (key, value), slots, self._num_rows)
        return keys, values

    def _mark_written(self, span: KVSpan) -> None:
        """Note which slots a forward writes; once for all layers."""
        if span.rows is None and isinstance(span.start, int):
            self._written.mark_first(self._num_rows, span.start + span.width)
        else:
            rows, starts = span.on_host(self._num_rows)
            self._written.mark(rows, starts + span.width)
        self._marked_span = span

    def _first_slots(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots of all rows [R, H, S, D]."""
        keys, values = self._used_rows(self._keys[layer]), self._used_rows(self._values[layer])
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def _used_rows(self, block: Tensor) -> Tensor:
        """The rows of a block that are in use; it may have grown to more."""
        return block if block.shape[0] == self._num_rows else block.narrow(0, 0, self._num_rows)

    def _write_index(self, span: KVSpan, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [N] and slots [N, T] of a span on a device, computed once per forward and device."""
        cached = self._index_by_device.get(device)
        if cached is None or cached[0] is not span:
            rows = (
                torch.arange(self._num_rows, device=device)
                if span.rows is None
                else span.rows.to(device, non_blocking=True)
            )
            slots = torch.arange(span.width, device=device)
            start = span.start
            if isinstance(start, Tensor):
                start = start.to(device, non_blocking=True)[:, None]
            cached = self._index_by_device[device] = (span, rows, slots + start)
        return cached[1:]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.prepare_commit(parents, lengths)()

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        if parents is None:
            return partial(self._set_rows, None, lengths)
        parent_rows = parents.numpy()
        moved = (parent_rows != np.arange(len(parent_rows))).nonzero()[0]
        if not len(moved):
            return partial(self._set_rows, parents, lengths)
        sources, stop = parent_rows[moved], int(lengths.numpy()[moved].max())
        self._ensure_rows(max(len(parent_rows), self._num_rows))
        copies = self._prepare_moves(moved, sources, self._prefix_groups.shared_length(moved, sources), stop)

        def commit() -> None:
            copies.run()
            self._written.clear(self._all_blocks(), moved, np.full_like(moved, stop))
            self.copied_slots += copies.num_slots
            self._set_rows(parents, lengths)

        return commit

    def _grown_length(self, old: int, slots: int) -> int:
        """How many slots a block gets that must have at least `slots`."""
        if not old:  # no spare slots: the activations of a prefill need memory that a decode step does not
            return slots
        grown, expected = slots + max(slots // 8, _MIN_GROWTH), self._expected_length
        if expected is None or slots > expected:
            return grown
        return expected if expected <= slots + _LAST_GROWTH else min(grown, expected)
