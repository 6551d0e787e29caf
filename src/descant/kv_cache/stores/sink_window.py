"""Blocks with the first and the latest positions of rows, of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.blocks.slots import SlotCopies, SlotCopy
from descant.kv_cache.stores.block_store import BlockStore, KVPair, take_rows

__all__ = ["SinkWindowBlocks", "SinkWindowPlan", "check_sizes"]

# Blocks start with this many free slots, because most rows never reach the maximum.
_GROWTH_STEP = 64


@dataclass
class PrefillBuffer:
    """Uncommitted keys and values of rows written from position 0, minus positions that are never needed."""

    rows: Array  # [N] distinct
    num_dropped: Array  # [N] how many positions after the sinks are left out
    layers: dict[int, KVPair]  # layer -> [N, H, S, D]

    @property
    def num_slots(self) -> int:
        """The number of slots of each row."""
        return next(iter(self.layers.values()))[0].shape[2]


class BufferedRows(NamedTuple):
    """Rows of a prefill buffer that are written to the blocks."""

    buffer: PrefillBuffer
    sources: Array  # [M] which rows of the buffer
    rows: Array  # [M] the rows of the blocks
    num_dropped: Array  # [M] how many positions after the sinks are left out
    num_slots: int  # of the longest row


class SinkWindowPlan:
    """Where a forward writes and reads, computed once for all layers (host).

    Of each row `past_lengths` [N] slots before the written ones are visible, and `num_skipped` [N] slots
    after the sinks are not. A forward writes to the blocks unless it has a prefill buffer.
    """

    def __init__(self, span: KVSpan, rows: Array, start: Array, num_dropped: Array, max_visible: int) -> None:
        self.span, self.rows, self.start = span, rows, start  # [N] the rows fed, the first position fed
        self.write_start = start - num_dropped  # [N] the slot of that position
        self.num_skipped = np.maximum(self.write_start - max_visible, 0)
        self.past_lengths = self.write_start - self.num_skipped
        self.num_slots = int(self.past_lengths.max(initial=0)) + span.width  # visible ones
        self.required_slots = int(self.write_start.max(initial=0)) + span.width  # of a block
        # None where rows differ, or not all of them are fed.
        self.common_write_start = None if span.rows is not None else _common_value(self.write_start)
        self.common_skip = _common_value(self.num_skipped)
        self.prefill_buffer: PrefillBuffer | None = None
        self.is_marked = False  # whether its slots are marked as written
        self.memo: dict[Any, Any] = {}  # what is computed once for each device


class SinkWindowBlocks(BlockStore):
    """The first `num_sinks` positions of every row and at least the last `window + slack`.

    Keys and values are [R, H, S, D] per layer. A sink is at the slot of its position, any other position `p`
    at slot `p - num_dropped`. A query sees the sinks and the last `window` positions before it; the slack
    allows rows to be cut. A commit trims all rows at once, about every `room` positions. So rows of equal
    length keep equal offsets, and without sinks they are read without a copy.
    """

    grows = False
    new_row: ClassVar[Mapping[str, int | bool]] = {"gaps": 0}
    row_growth: ClassVar[float] = 1.5

    def __init__(self, num_sinks: int, window: int, slack: int, room: int = 64) -> None:
        super().__init__(num_sinks, window, slack, room)
        self._num_sinks, self._max_visible = num_sinks, num_sinks + window
        self._trimmed_size = num_sinks + window + slack  # slots of a row after a trim
        self._max_slots = self._trimmed_size + room  # slots of a block
        self._trim_threshold = self._max_slots - room // 4  # a row with more slots causes a trim
        self.max_rewind: int | None = slack
        self._prefill_buffers: list[PrefillBuffer] = []
        # By layer the slots that `_visible_kv` overwrote with the sinks, and the first of them.
        self._saved_slots: dict[int, tuple[int, KVPair]] = {}
        self._plan: SinkWindowPlan | None = None

    @property
    def _num_dropped(self) -> Array:
        """The number of positions after the sinks that each row has dropped [R]."""
        return self._columns["gaps"].numpy()

    @property
    def slot_counts(self) -> Tensor:
        """The number of slots of each row [R] (host)."""
        return self._lengths - self._columns["gaps"]

    @property
    def nbytes(self) -> int:
        """The memory of blocks and prefill buffers in bytes."""
        buffered = (pair for buffer in self._prefill_buffers for pair in buffer.layers.values())
        return super().nbytes + sum(tensor.nbytes for pair in buffered for tensor in pair)

    def _clear_rows(self, rows: Array) -> None:
        self._plan = None
        super()._clear_rows(rows)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store with the same settings."""
        super().load(state)
        self._check_rewind(self._lengths.numpy(), self._num_dropped)

    # -------------------------------------------------------------------- one forward
    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - layers are alike
        """The slots that `update` will return."""
        plan = self.plan_forward(span)
        return VisibleSlots(torch.from_numpy(plan.past_lengths), plan.num_slots)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> KVPair:
        """Write [N, H, T, D] at the span; returns the visible slots of its rows [N, H, S, D], packed."""
        return self._update(layer, key, value, span)

    def _update(
        self, layer: int, key: Tensor, value: Tensor, span: KVSpan, writable_sinks: bool = False
    ) -> KVPair:
        """Write at the span and read.

        With `writable_sinks` the returned sinks may be overwritten until the layer's next update or commit.
        """
        plan = self.plan_forward(span)
        self._restore_layer(layer)
        if plan.prefill_buffer is not None:
            self._buffer_prefill(plan.prefill_buffer, layer, (key, value))
            return key, value
        pair = self._ensure_capacity(layer, (key, value), plan.required_slots, len(self))
        if not plan.is_marked:
            self._written.mark(plan.rows, plan.write_start + span.width)
            plan.is_marked = True
        if plan.common_write_start is not None:
            for block, new in zip(pair, (key, value), strict=True):
                block[: len(self), :, plan.common_write_start : plan.common_write_start + span.width] = new
        else:
            rows, slots, _ = self._device_index(plan, key.device)
            for block, new in zip(pair, (key, value), strict=True):
                block[rows[:, None], :, slots] = new.transpose(1, 2)
        return (key, value) if span.is_first_write else self._visible_kv(layer, pair, plan, writable_sinks)

    def _buffer_prefill(self, buffer: PrefillBuffer, layer: int, pair: KVPair) -> None:
        """Keep the keys and values [N, H, T, D] of a layer until the commit, without those never needed."""
        if buffer.num_dropped.any():
            width, device = pair[0].shape[2], pair[0].device
            slots = self._packed_slots(buffer.num_dropped, width - int(buffer.num_dropped.min()))
            slots = slots.to(device, non_blocking=True)
            rows, at = torch.arange(len(slots), device=device)[:, None], slots.clamp(max=width - 1)
            pair = pair[0][rows, :, at].transpose(1, 2), pair[1][rows, :, at].transpose(1, 2)
        if not buffer.layers:
            self._prefill_buffers.append(buffer)
        buffer.layers[layer] = pair

    def plan_forward(self, span: KVSpan) -> SinkWindowPlan:
        """The plan of a forward; writes buffered prefills to the blocks if their rows are fed again."""
        if self._plan is None or self._plan.span is not span:
            self._plan = self._make_plan(span)
        return self._plan

    def _make_plan(self, span: KVSpan) -> SinkWindowPlan:
        rows, start = span.on_host(len(self))
        if span.is_first_write:  # what was buffered for these rows is written again
            self._prefill_buffers = [
                buffer for buffer in self._prefill_buffers if not np.isin(buffer.rows, rows).all()
            ]
        if any(np.isin(buffer.rows, rows).any() for buffer in self._prefill_buffers):
            self._flush_prefills()
        num_dropped, prefill_buffer = self._num_dropped[rows], None
        if span.is_first_write and (span.width > self._max_slots or num_dropped.any()):
            # Committed positions before the window and its slack are never needed again.
            committed = np.zeros_like(rows) if span.num_committed is None else span.num_committed.numpy()
            excess = np.maximum(committed - self._trimmed_size, 0)
            excess = excess if excess.all() else np.zeros_like(excess)
            prefill_buffer = PrefillBuffer(rows, excess, {})
            num_dropped = np.zeros_like(num_dropped)
        self._check_rewind(start, num_dropped)
        plan = SinkWindowPlan(span, rows, start, num_dropped, self._max_visible)
        plan.prefill_buffer = prefill_buffer
        return plan

    def _check_rewind(self, lengths: Array, num_dropped: Array) -> None:
        """Refuse lengths whose window was partly dropped."""
        too_short = (num_dropped > 0) & (lengths < num_dropped + self._max_visible)
        if too_short.any():
            row = int(too_short.argmax())
            minimum = int(num_dropped[row]) + self._max_visible
            raise InputError(
                "lengths",
                f"must be >= {minimum} for row {row}, whose earlier positions were dropped",
                int(lengths[row]),
                f"cut at most {self.max_rewind} positions, or set a larger `slack`",
            )

    def _packed_slots(self, num_dropped: Array, slots: int) -> Tensor:
        """Where the first slots [N, S] (host) of rows are that drop `num_dropped` [N] after the sinks."""
        slot = np.arange(slots)
        return torch.from_numpy(slot + num_dropped[:, None] * (slot >= self._num_sinks))

    def _device_index(self, plan: SinkWindowPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The rows [N] of a plan and the slots that they write [N, T] and read [N, S]."""
        if device not in plan.memo:
            rows, write_start = (
                torch.from_numpy(array).to(device, non_blocking=True)
                for array in (plan.rows, plan.write_start)
            )
            write_slots = write_start[:, None] + torch.arange(plan.span.width, device=device)
            read_slots = self._packed_slots(plan.num_skipped, plan.num_slots).to(device, non_blocking=True)
            plan.memo[device] = rows, write_slots, read_slots
        index: tuple[Tensor, Tensor, Tensor] = plan.memo[device]
        return index

    def _visible_kv(self, layer: int, pair: KVPair, plan: SinkWindowPlan, writable_sinks: bool) -> KVPair:
        """The visible slots of the fed rows: a view of the blocks if all offsets are equal, else a copy."""
        keys, values = pair
        if plan.common_skip is None or plan.span.rows is not None:
            rows, _, slots = self._device_index(plan, keys.device)
            keys, values = (gather_slots(block, rows, slots) for block in pair)
            return keys, values
        visible = slice(plan.common_skip, plan.common_skip + plan.num_slots)
        keys, values = keys[: len(self), :, visible], values[: len(self), :, visible]
        if self._num_sinks and (writable_sinks or plan.common_skip):
            # The sinks overwrite the slots just before the window; `_restore_slots` undoes this.
            sinks = slice(0, self._num_sinks)
            saved = keys[:, :, sinks].clone(), values[:, :, sinks].clone()
            self._saved_slots[layer] = plan.common_skip, saved
            if plan.common_skip:
                for block, view in zip(pair, (keys, values), strict=True):
                    view[:, :, sinks] = block[: len(self), :, sinks].clone()
        return keys, values

    def _restore_slots(self) -> None:
        """Restore the slots that sinks have overwritten."""
        for layer in list(self._saved_slots):
            self._restore_layer(layer)

    def _restore_layer(self, layer: int) -> None:
        if layer in self._saved_slots:
            first, saved = self._saved_slots[layer]
            for blocks, slots in zip(self._blocks.values(), saved, strict=True):
                blocks[layer][: len(slots), :, first : first + self._num_sinks] = slots
            del self._saved_slots[layer]  # last: an interrupted restoration is made again

    def _grown_length(self, old: int, slots: int) -> int:
        """How many slots a block gets; not more than the maximum unless it must have them."""
        return max(slots, min(slots + old // 2 + _GROWTH_STEP, self._max_slots))

    def _flush_prefills(self) -> None:
        """Write buffered prefills to the blocks, because their rows are read before the commit."""
        self._restore_slots()
        prefills = [
            BufferedRows(
                buffer, np.arange(len(buffer.rows)), buffer.rows, buffer.num_dropped, buffer.num_slots
            )
            for buffer in self._prefill_buffers
        ]
        self._reserve_prefills(prefills, len(self))
        copies = SlotCopies()
        self._add_prefills(copies, prefills)
        copies.run()
        for buffer in self._prefill_buffers:
            self._num_dropped[buffer.rows] = buffer.num_dropped
        self._prefill_buffers = []

    # -------------------------------------------------------------------- between forwards
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; slots outside the window are dropped."""
        self.prepare_commit(parents, lengths)()

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        self._restore_slots()
        count, new_lengths = len(lengths), lengths.numpy()
        source = np.arange(count) if parents is None else parents.numpy()
        num_dropped, moves = self._num_dropped[source], source != np.arange(count)
        moved = moves.nonzero()[0]
        found: list[tuple[PrefillBuffer, Array, Array]] = []
        for buffer in self._prefill_buffers:
            rows, index = (source[:, None] == buffer.rows).nonzero()
            excess = np.maximum(new_lengths[rows] - self._trimmed_size, buffer.num_dropped[index])
            num_dropped[rows], moves[rows] = np.where(new_lengths[rows] > 0, excess, 0), False
            if len(rows):
                found.append((buffer, index, rows))
        self._check_rewind(new_lengths, num_dropped)
        num_slots = new_lengths - num_dropped
        prefills = [
            BufferedRows(buffer, index, rows, num_dropped[rows], int(num_slots[rows].max()))
            for buffer, index, rows in found
        ]
        self._ensure_rows(max(count, len(self)))
        self._reserve_prefills(prefills, max(count, len(self)))
        rows = moves.nonzero()[0]
        stop = int(num_slots[rows].max(initial=0))
        shared = self._prefix_groups.shared_length(rows, source[rows]) - num_dropped[rows]
        shared[self._num_dropped[np.minimum(rows, len(self) - 1)] != num_dropped[rows]] = 0
        copies = self._prepare_moves(rows, source[rows], np.maximum(shared, 0), stop)
        self._add_prefills(copies, prefills)

        def commit() -> None:
            copies.run()
            self._written.mark(rows, stop)
            self._written.clear(self._all_blocks(), moved, num_slots[moved])
            self.copied_slots += copies.num_slots
            self._set_rows(parents, lengths)
            self._columns = {"gaps": torch.from_numpy(num_dropped)}
            self._prefill_buffers, self._plan = [], None
            self._trim()

        return commit

    def _reserve_prefills(self, prefills: Sequence[BufferedRows], rows: int) -> None:
        """Grow the blocks for rows of buffers."""
        for prefill in prefills:
            for layer, pair in prefill.buffer.layers.items():
                self._ensure_capacity(layer, pair, prefill.num_slots, rows)

    def _add_prefills(self, copies: SlotCopies, prefills: Sequence[BufferedRows]) -> None:
        """Add the copies of rows of buffers to the blocks, which have the capacity."""
        for buffer, buffered, rows, num_dropped, num_slots in prefills:
            self._written.mark(rows, num_slots)
            slots = self._packed_slots(num_dropped - buffer.num_dropped[buffered], num_slots)
            slots = slots.clamp(max=max(buffer.num_slots - 1, 0))[:, None]
            index = torch.from_numpy(buffered), torch.from_numpy(rows), slots
            for layer, pair in buffer.layers.items():
                sources, targets, at = (copies.send(part, pair[0].device) for part in index)
                for part, blocks in zip(pair, self._blocks.values(), strict=True):
                    copies.add([SlotCopy(part, sources, blocks[layer].narrow(2, 0, num_slots), targets, at)])

    def _trim(self) -> None:
        """Drop slots outside window and slack in all rows, once a row is nearly full.

        Without memory for it nothing is dropped: rows may wait for the next commit.
        """
        num_slots = self._lengths.numpy() - self._num_dropped
        is_full = int(num_slots.max(initial=0)) > self._trim_threshold
        excess = np.maximum(num_slots - self._trimmed_size, 0)
        try:
            drop = self._prepare_drop(excess) if is_full else None
        except (RuntimeError, MemoryError):
            return
        if drop is not None:
            drop.run()
            self._columns = {"gaps": torch.from_numpy(self._num_dropped + excess)}
        try:
            for layer, keys in self._keys.items():
                if keys.shape[2] > self._max_slots:
                    smaller = [
                        take_rows(blocks[layer], torch.arange(len(keys)), self._max_slots)
                        for blocks in self._blocks.values()
                    ]
                    for blocks, block in zip(self._blocks.values(), smaller, strict=True):
                        blocks[layer] = block
        except (RuntimeError, MemoryError):
            return

    def _prepare_drop(self, excess: Array) -> SlotCopies:
        """Copies that drop the first `excess` [R] slots after the sinks."""
        rows, copies = excess.nonzero()[0], SlotCopies()
        index = torch.from_numpy(rows), self._packed_slots(excess[rows], self._trimmed_size)[:, None]
        for block in self._all_blocks():
            at, slots = (copies.send(part, block.device) for part in index)
            copies.add([SlotCopy(block, at, block.narrow(2, 0, self._trimmed_size), at, slots)])
        return copies


def check_sizes(slack: int, room: int) -> None:
    """Raise for a slack or a room that cannot be."""
    for name, value, minimum in (("slack", slack, 0), ("room", room, 1)):
        if value < minimum:
            raise InputError(name, f"must be >= {minimum}", value)


def gather_slots(block: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """The slots [N, S] of rows [N] of a block, [N, H, S, D]."""
    _, heads, width, size = block.shape
    base = rows[:, None, None] * (heads * width)
    base = base + torch.arange(heads, device=block.device)[:, None] * width
    # index_select on the flat block copies whole vectors, several times faster than advanced indexing.
    gathered = block.reshape(-1, size).index_select(0, (base + slots[:, None]).flatten())
    return gathered.view(len(rows), heads, slots.shape[1], size)


def _common_value(numbers: Array) -> int | None:
    """The value that all entries have; None if they differ or there are none."""
    return int(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else None
