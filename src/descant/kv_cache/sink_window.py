"""Blocks with the first and the latest positions of rows, of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.prefill_buffer import (
    KVPair,
    PrefillBuffer,
    flat_slot_index,
    gather_slots,
    grow_block,
)
from descant.kv_cache.prefix_groups import PrefixGroups
from descant.kv_cache.row_copies import CopyBuffers, RowCopies, RowCopy
from descant.kv_cache.sink_window_plan import SinkWindowIndex, SinkWindowPlan
from descant.kv_cache.written_slots import WrittenSlots

__all__ = ["SinkWindowBlocks"]

# Blocks start with this many free slots, because most rows never reach the maximum.
_GROWTH_STEP = 64


class SinkWindowBlocks:
    """The first `num_sinks` positions of every row and at least the last `window + slack`.

    Keys and values are [R, H, S, D] per layer. A sink is at the slot of its position, any other position `p`
    at slot `p - num_dropped`. A query sees the sinks and the last `window` positions before it; the slack
    allows rows to be cut. A commit trims all rows at once, about every `room` positions. So rows of equal
    length keep equal offsets, and without sinks they are read without a copy.
    """

    def __init__(self, num_sinks: int, window: int, slack: int, room: int = 64) -> None:
        self._init_args = num_sinks, window, slack, room
        self._num_sinks, self._max_visible = num_sinks, num_sinks + window
        self._trimmed_size = num_sinks + window + slack  # slots of a row after a trim
        self._max_slots = self._trimmed_size + room  # slots of a block
        self._trim_threshold = self._max_slots - room // 4  # a row with more slots causes a trim
        self.max_rewind: int | None = slack
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._num_dropped: Array = np.zeros(0, dtype=np.int64)
        self._blocks: dict[int, KVPair] = {}
        self._prefill_buffers: list[PrefillBuffer] = []
        # By layer the slots that `_visible_kv` overwrote with the sinks, and the first of them.
        self._saved_slots: dict[int, tuple[int, KVPair]] = {}
        self._prefix_groups = PrefixGroups()
        self._written = WrittenSlots()
        self.copied_slots = 0  # slots copied between rows, as in DenseStore
        self._plan: SinkWindowPlan | None = None
        self._index_by_device: dict[torch.device, SinkWindowIndex] = {}

    def __len__(self) -> int:
        return len(self._num_dropped)

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), dropped ones included."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """The memory of blocks and prefill buffers in bytes."""
        buffered = (pair for buffer in self._prefill_buffers for pair in buffer.layers.values())
        return sum(tensor.nbytes for pair in (*self._blocks.values(), *buffered) for tensor in pair)

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._clear_rows(np.arange(len(self), len(self) + rows))
        self._prefix_groups.extend(rows)
        self._num_dropped = np.concatenate((self._num_dropped, np.zeros(rows, dtype=np.int64)))
        self._lengths, self._plan = lengths, None

    def _clear_rows(self, rows: Array) -> None:
        """Zero all that earlier rows have left in the place of these rows [N]."""
        self._restore_slots()
        self._written.clear(self._all_blocks(), rows, np.zeros_like(rows))

    def _all_blocks(self) -> list[Tensor]:
        return [block for pair in self._blocks.values() for block in pair]

    # -------------------------------------------------------------------- one forward
    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots:  # noqa: ARG002 - layers are alike
        """The slots that `update` will return."""
        plan = self.plan_forward(span)
        return VisibleSlots(torch.from_numpy(plan.past_lengths), plan.num_slots)

    def update(
        self, layer: int, key: Tensor, value: Tensor, span: KVSpan, writable_sinks: bool = False
    ) -> KVPair:
        """Write [N, H, T, D] at the span; returns the visible slots of its rows [N, H, S, D], packed.

        With `writable_sinks` the returned sinks may be overwritten until the layer's next update or commit.
        """
        plan = self.plan_forward(span)
        self._restore_slots(layer)
        if plan.prefill_buffer is not None:
            if not plan.prefill_buffer.layers:
                self._prefill_buffers.append(plan.prefill_buffer)
            plan.prefill_buffer.write(layer, (key, value))
            return key, value
        pair = self._ensure_capacity(layer, (key, value), plan.required_slots, len(self))
        if not plan.is_marked:
            self._written.mark(plan.rows, plan.write_start + span.width)
            plan.is_marked = True
        if plan.common_write_start is not None:
            for block, new in zip(pair, (key, value), strict=True):
                block[: len(self), :, plan.common_write_start : plan.common_write_start + span.width] = new
        else:
            index = self._device_index(plan, key.device)
            for block, new in zip(pair, (key, value), strict=True):
                block[index.rows[:, None], :, index.write_slots] = new.transpose(1, 2)
        return (key, value) if span.is_first_write else self._visible_kv(layer, pair, plan, writable_sinks)

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
            prefill_buffer = PrefillBuffer(rows, excess, self._num_sinks)
            num_dropped = np.zeros_like(num_dropped)
        self._check_rewind(start, num_dropped)
        write_start = start - num_dropped
        skipped = np.maximum(write_start - self._max_visible, 0)
        return SinkWindowPlan(span, rows, start, write_start, skipped, write_start - skipped, prefill_buffer)

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
                f"cut at most {self._init_args[2]} positions, or set a larger `slack`",
            )

    def _device_index(self, plan: SinkWindowPlan, device: torch.device) -> SinkWindowIndex:
        """The indices of a plan on a device, computed once per forward and device."""
        index = self._index_by_device.get(device)
        if index is None or index.plan is not plan:
            rows, write_start, skipped = (
                torch.from_numpy(array).to(device, non_blocking=True)
                for array in (plan.rows, plan.write_start, plan.num_skipped)
            )
            slots = torch.arange(plan.num_slots, device=device)
            index = self._index_by_device[device] = SinkWindowIndex(
                plan,
                rows,
                write_start[:, None] + torch.arange(plan.span.width, device=device),
                slots + skipped[:, None] * (slots >= self._num_sinks),
            )
        return index

    def _visible_kv(self, layer: int, pair: KVPair, plan: SinkWindowPlan, writable_sinks: bool) -> KVPair:
        """The visible slots of the fed rows: a view of the blocks if all offsets are equal, else a copy."""
        keys, values = pair
        if plan.common_skip is None or plan.span.rows is not None:
            index = self._device_index(plan, keys.device)
            keys, values = (gather_slots(block, index.rows, index.read_slots) for block in pair)
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

    def _restore_slots(self, layer: int | None = None) -> None:
        """Restore the slots that sinks have overwritten, in one layer or in all."""
        for saved_layer in list(self._saved_slots) if layer is None else [layer]:
            if saved_layer in self._saved_slots:
                first, saved = self._saved_slots[saved_layer]
                for block, slots in zip(self._blocks[saved_layer], saved, strict=True):
                    block[: slots.shape[0], :, first : first + self._num_sinks] = slots
                del self._saved_slots[saved_layer]  # last: an interrupted restoration is made again

    def _ensure_capacity(self, layer: int, like: KVPair, slots: int, rows: int) -> KVPair:
        """The layer's blocks, grown to at least so many rows and slots, both or none."""
        pair = self._blocks.get(layer)
        if pair is not None and pair[0].shape[0] >= rows and pair[0].shape[2] >= slots:
            return pair
        if pair is None:
            width = max(slots, min(slots + _GROWTH_STEP, self._max_slots))
            keys, values = (new.new_zeros(rows, new.shape[1], width, new.shape[3]) for new in like)
        else:
            width = pair[0].shape[2]
            if slots > width:
                width = max(slots, min(slots + width // 2 + _GROWTH_STEP, self._max_slots))
            keys, values = (grow_block(block, rows, width) for block in pair)
        self._blocks[layer] = keys, values
        return keys, values

    def _flush_prefills(self) -> None:
        """Write buffered prefills to the blocks, because their rows are read before the commit."""
        self._restore_slots()
        for buffer in self._prefill_buffers:
            self._reserve_first_slots(buffer.layers, len(self))
        for buffer in self._prefill_buffers:
            self._num_dropped[buffer.rows] = buffer.num_dropped
            self._write_first_slots(buffer.rows, buffer.layers)
        self._prefill_buffers = []

    def _reserve_first_slots(self, layers: Mapping[int, KVPair], rows: int) -> None:
        """Grow the blocks for what `_write_first_slots` will write."""
        for layer, pair in layers.items():
            self._ensure_capacity(layer, pair, pair[0].shape[2], rows)

    def _write_first_slots(self, rows: Array, layers: Mapping[int, KVPair]) -> None:
        """Write the first slots of rows, by layer [N, H, S, D]; the blocks have the capacity."""
        for layer, pair in layers.items():
            self._written.mark(rows, pair[0].shape[2])
            for block, new in zip(self._blocks[layer], pair, strict=True):
                block[torch.from_numpy(rows).to(new.device), :, : new.shape[2]] = new

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
        from_buffers: list[tuple[PrefillBuffer, Array, Array]] = []
        for buffer in self._prefill_buffers:
            rows, index = buffer.find_children(source)
            excess = np.maximum(new_lengths[rows] - self._trimmed_size, buffer.num_dropped[index])
            num_dropped[rows], moves[rows] = np.where(new_lengths[rows] > 0, excess, 0), False
            from_buffers.append((buffer, rows, index))
        self._check_rewind(new_lengths, num_dropped)
        num_slots = new_lengths - num_dropped
        prefills = [
            (rows, buffer.read(index, num_dropped[rows], int(num_slots[rows].max())))
            for buffer, rows, index in from_buffers
            if len(rows)
        ]
        num_rows = max(count, len(self))
        for layer, pair in list(self._blocks.items()):
            self._ensure_capacity(layer, pair, 0, num_rows)
        for _, layers in prefills:
            self._reserve_first_slots(layers, num_rows)
        rows = moves.nonzero()[0]
        stop = int(num_slots[rows].max(initial=0))
        copies = RowCopies(self._all_blocks(), self._plan_moves(source[rows], rows, num_dropped[rows], stop))

        def commit() -> None:
            copies.run()
            self._written.mark(rows, stop)
            for buffered_rows, layers in prefills:
                self._write_first_slots(buffered_rows, layers)
            self._written.clear(self._all_blocks(), moved, num_slots[moved])
            self.copied_slots += copies.num_slots
            self._num_dropped, self._lengths = num_dropped, lengths
            self._prefix_groups.commit(None if parents is None else source, new_lengths)
            self._prefill_buffers, self._plan = [], None
            self._trim()

        return commit

    def _plan_moves(self, source: Array, target: Array, num_dropped: Array, stop: int) -> list[RowCopy]:
        """The copies of rows of the blocks up to slot `stop`, without the prefix that both share."""
        num_old = len(self)
        shared = self._prefix_groups.shared_length(target, source) - num_dropped
        related = (shared > 0) & (self._num_dropped[np.minimum(target, num_old - 1)] == num_dropped)
        copies = []
        for group, shares in ((related, True), (~related, False)):  # at most two copies, each of one slice
            if not group.any():
                continue
            start = int(shared[group].min()) if shares else 0
            if start < stop:
                targets, sources = torch.from_numpy(target[group]), torch.from_numpy(source[group])
                copies.append(RowCopy(targets, sources, slice(start, stop)))
        return copies

    def _trim(self) -> None:
        """Drop slots outside window and slack in all rows, once a row is nearly full.

        Without memory for it nothing is dropped: rows may wait for the next commit.
        """
        num_slots = self._lengths.numpy() - self._num_dropped
        if int(num_slots.max(initial=0)) > self._trim_threshold:
            excess = np.maximum(num_slots - self._trimmed_size, 0)
            try:
                drop = self._prepare_drop(excess)
            except (RuntimeError, MemoryError):
                return
            drop()
            self._num_dropped = self._num_dropped + excess
        for layer, pair in self._blocks.items():
            if pair[0].shape[2] > self._max_slots:
                try:
                    keys, values = (block[:, :, : self._max_slots].clone() for block in pair)
                except (RuntimeError, MemoryError):
                    return
                self._blocks[layer] = keys, values

    def _prepare_drop(self, excess: Array) -> Callable[[], None]:
        """What drops the first `excess` [R] slots after the sinks, with all memory allocated."""
        rows, slots, buffers = excess.nonzero()[0], np.arange(self._trimmed_size), CopyBuffers()
        kept = torch.from_numpy(slots + excess[rows][:, None] * (slots >= self._num_sinks))
        indices: dict[object, tuple[Tensor, Tensor]] = {}
        parts = []
        for block in self._all_blocks():
            shape, key = (len(rows), block.shape[1], len(slots), block.shape[3]), (block.device, *block.shape)
            content = buffers.reserve(0, shape, block)
            if key not in indices:
                at = torch.from_numpy(rows).to(block.device)
                indices[key] = at, flat_slot_index(block, at, kept.to(block.device))
            parts.append((block, content, *indices[key]))

        def drop() -> None:
            for block, content, at, index in parts:
                size = block.shape[3]
                torch.index_select(block.view(-1, size), 0, index, out=content.view(-1, size))
                block[:, :, : len(slots)].index_copy_(0, at, content)

        return drop

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._blocks)

    def read(self, layer: int, rows: Tensor) -> KVPair:
        """The committed slots of rows [N] (host) in a layer, packed; stale behind a row's end."""
        self._restore_slots()
        stop = int((self._lengths.numpy() - self._num_dropped)[rows.numpy()].max(initial=0))
        keys, values = (
            block[rows.to(block.device), :, :stop]
            for block in self._ensure_capacity(layer, self._blocks[layer], 0, len(self))
        )
        return keys, values

    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        self._restore_slots()
        other = type(self)(*self._init_args)
        other._lengths, other._num_dropped = self._lengths[rows].clone(), self._num_dropped[rows.numpy()]
        other._prefix_groups = self._prefix_groups.select(rows.numpy(), other._lengths.numpy())
        for layer, pair in self._blocks.items():
            grown = self._ensure_capacity(layer, pair, 0, len(self))
            keys, values = (block[rows.to(block.device)] for block in grown)
            other._blocks[layer] = keys, values
            other._written.mark(np.arange(len(rows)), keys.shape[2])
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another one."""
        self._restore_slots()
        other._restore_slots()
        first, count = len(self), len(other)
        lengths = torch.cat((self._lengths, other._lengths))
        stop = int((other._lengths.numpy() - other._num_dropped).max(initial=0))
        for layer, pair in other._blocks.items():
            self._ensure_capacity(layer, pair, stop, first + count)
        added = np.arange(first, first + count)
        self._clear_rows(added)
        self._written.mark(added, stop)
        for layer, pair in other._blocks.items():
            for block, rows in zip(self._blocks[layer], pair, strict=True):
                content = rows[:count, :, :stop]
                block[first : first + len(content), :, :stop] = content
        self._prefix_groups.join(other._prefix_groups)
        self._num_dropped = np.concatenate((self._num_dropped, other._num_dropped))
        self._lengths, self._plan = lengths, None

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._restore_slots()
        for layer, (keys, values) in self._blocks.items():
            self._blocks[layer] = keys.to(device), values.to(device)
        self._index_by_device = {}

    def state(self) -> dict[str, Tensor]:
        """All committed rows: lengths, dropped positions, and by layer a block of keys and one of values."""
        self._restore_slots()
        stop = int((self._lengths.numpy() - self._num_dropped).max(initial=0))
        state = {"lengths": self._lengths.clone(), "gaps": torch.from_numpy(self._num_dropped.copy())}
        for layer, pair in self._blocks.items():
            grown = self._ensure_capacity(layer, pair, 0, len(self))
            for name, block in zip(("keys", "values"), grown, strict=True):
                state[f"{name}.{layer}"] = block[: len(self), :, :stop].clone(
                    memory_format=torch.contiguous_format
                )
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty one."""
        self._lengths = state["lengths"].long().cpu().clone()
        self._num_dropped = state["gaps"].long().cpu().numpy().copy()
        self._check_rewind(self._lengths.numpy(), self._num_dropped)
        self._prefix_groups.extend(len(self))
        for name, keys in state.items():
            kind, _, layer = name.partition(".")
            if kind == "keys":
                values = state[f"values.{layer}"]
                self._blocks[int(layer)] = keys.clone(), values.clone()
                self._written.mark(np.arange(len(self)), keys.shape[2])
