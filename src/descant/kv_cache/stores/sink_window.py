"""Stores of bounded size with the latest positions of rows: behind the first ones, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.attention.attention_proxy import (
    AttentionCall,
    KVProxy,
    TensorKVProxy,
    TransposedKVProxy,
)
from descant.kv_cache.stores.block_store import (
    BlockStore,
    HeadSize,
    KVPair,
    SlotCopies,
    SlotCopy,
    StoreGroup,
    Workload,
    write_slots,
)
from descant.kv_cache.stores.dense import DenseStore

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
        # Whether the sinks of the layer at hand may be overwritten until its next update or commit.
        self.writes_sinks = False
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
            write_slots(pair, (key, value), *self._device_index(plan, key.device)[:2])
        return (key, value) if span.is_first_write else self._visible_kv(layer, pair, plan)

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
            self._plan = plan
        return self._plan

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

    def _visible_kv(self, layer: int, pair: KVPair, plan: SinkWindowPlan) -> KVPair:
        """The visible slots of the fed rows: a view of the blocks if all offsets are equal, else a copy."""
        keys, values = pair
        if plan.common_skip is None or plan.span.rows is not None:
            rows, _, slots = self._device_index(plan, keys.device)
            keys, values = (gather_slots(block, rows, slots) for block in pair)
            return keys, values
        visible = slice(plan.common_skip, plan.common_skip + plan.num_slots)
        keys, values = keys[: len(self), :, visible], values[: len(self), :, visible]
        if self._num_sinks and (plan.writes_sinks or plan.common_skip):
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
        """The number of slots that a block gets; not more than the maximum unless it must have them."""
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
    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit that drops slots outside the window; nothing changes until it is called."""
        self._restore_slots()
        count, new_lengths = len(lengths), lengths.numpy()
        source = np.arange(count) if parents is None else parents.numpy()
        num_dropped, moves = self._num_dropped[source], source != np.arange(count)
        moved = moves.nonzero()[0]
        prefills = []
        for buffer in self._prefill_buffers:
            rows, index = (source[:, None] == buffer.rows).nonzero()
            if len(rows):
                excess = np.maximum(new_lengths[rows] - self._trimmed_size, buffer.num_dropped[index])
                num_dropped[rows], moves[rows] = np.where(new_lengths[rows] > 0, excess, 0), False
                most = int((new_lengths - num_dropped)[rows].max())
                prefills.append(BufferedRows(buffer, index, rows, num_dropped[rows], most))
        self._check_rewind(new_lengths, num_dropped)
        num_slots = new_lengths - num_dropped
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
        size = self._max_slots
        self._shrink_blocks(
            {layer: (len(keys), size) for layer, keys in self._keys.items() if keys.shape[2] > size}
        )

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


# Rotates keys or queries [N, H, S, D] forward by a number of positions per row [N].
RotateFn = Callable[[Tensor, Tensor], Tensor]


class _SinkAttention:
    """The scores of one forward's queries over sinks and window, on one device."""

    def __init__(self, plan: SinkWindowPlan, device: torch.device, length: int, num_sinks: int) -> None:
        self._width, self._window_length, self.num_sinks = plan.span.width, length, num_sinks
        # [N] the number of dropped positions for the first query of each row; < 0 while the window has room.
        self._sink_shift = torch.from_numpy(plan.start - (length - 1)).to(device, non_blocking=True)
        self._past_lengths = torch.from_numpy(plan.past_lengths).to(device, non_blocking=True)
        self._mask: Tensor | None = None

    def shift_sinks(self, sinks: Tensor, rotate: RotateFn) -> Tensor:
        """The sinks rotated for the first query of each row."""
        return rotate(sinks, self._sink_shift.clamp(min=0))

    def scores(self, query: Tensor, keys: Tensor, rotate: RotateFn | None) -> Tensor:
        """The products of queries [N, Hq, T, D] with keys [N, Hq, T, S]; -inf where a key is not visible."""
        scores = _grouped_matmul(query, keys)
        if rotate is not None:
            rows, heads, width, size = query.shape
            shift = (self._sink_shift[:, None] + torch.arange(width, device=query.device)).clamp(min=0)
            # Rotating a query back gives the same products as rotating the keys forward.
            flat = query.transpose(1, 2).reshape(rows * width, heads, 1, size)
            flat = rotate(flat, -shift.flatten()).view(rows, width, heads, size)
            sink_keys = keys[:, :, : self.num_sinks]
            scores[..., : self.num_sinks] = _grouped_matmul(flat.transpose(1, 2), sink_keys)
        return scores.masked_fill(~self._visible_mask(keys.shape[2]), -torch.inf)

    def _visible_mask(self, size: int) -> Tensor:
        """The slots that each query sees [N, 1, T, S]."""
        if self._mask is None:
            device = self._past_lengths.device
            slots = torch.arange(size, device=device)
            offsets = torch.arange(self._width, device=device)[:, None]
            query_slot = self._past_lengths[:, None, None] + offsets
            in_window = slots > query_slot - (self._window_length - self.num_sinks)
            self._mask = ((in_window | (slots < self.num_sinks)) & (slots <= query_slot))[:, None]
        return self._mask


class _SinkWindowKeys(TensorKVProxy):
    """Keys of a forward of several queries, each with its own window and its own distance to the sinks.

    Works for torch's attention and for eager attention (a product with the transposed keys). Any other
    attention gets the keys as the first query of each row sees them, and later queries see too far back.
    """

    def __init__(self, keys: Tensor, attention: _SinkAttention, rotate: RotateFn | None) -> None:
        super().__init__(keys)
        self._sink_attention, self._rotate = attention, rotate

    def build_tensor(self) -> Tensor:
        """The keys [N, H, S, D] as the first query of each row sees them."""
        if self._rotate is None:
            return self.tensor
        num_sinks = self._sink_attention.num_sinks
        sinks = self._sink_attention.shift_sinks(self.tensor[:, :, :num_sinks], self._rotate)
        return torch.cat((sinks, self.tensor[:, :, num_sinks:]), 2)

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [N, Hq, T, E]."""
        query, mask = call.query, call.mask
        scores = self.scores(query) * (1 / sqrt(query.shape[-1]) if call.scale is None else call.scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        wide = torch.promote_types(query.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(query.dtype)
        weights = torch.dropout(weights, call.dropout, call.dropout > 0)
        return _grouped_matmul(weights, values.materialize().mT)

    def scores(self, query: Tensor) -> Tensor:
        """The product [N, Hq, T, S] of queries [N, Hq, T, D] with the keys; -inf where not visible."""
        return self._sink_attention.scores(query, self.tensor, self._rotate)

    def transpose(self, first: int, second: int) -> Any:
        """The keys transposed; over the last two dimensions a proxy, as in eager attention."""
        if {first % 4, second % 4} == {2, 3}:
            return TransposedKVProxy(self)
        return self.materialize().transpose(first, second)


def _grouped_matmul(query: Tensor, keys: Tensor) -> Tensor:
    """The product [N, Hq, T, S] of [N, Hq, T, D] and [N, H, S, D]; several query heads share a key head."""
    rows, heads, width, size = query.shape
    num_groups = keys.shape[1]
    grouped = query.reshape(rows, num_groups, heads // num_groups * width, size)
    return (grouped @ keys.mT).view(rows, heads, width, keys.shape[2])


class SinkStore(SinkWindowBlocks):
    """The first `sinks` positions of every row and the latest `length - sinks` (Xiao et al. 2023).

    A query sees `length` positions: the sinks, the positions just before it, and itself. arXiv 2309.17453
    renumbers positions within the cache, so that dropped positions leave no gap. Rotary embeddings depend on
    distances only, so here just the sinks are rotated forward, by the number of dropped positions, and
    always from the keys as first written, so errors do not accumulate. `rotation` may differ by layer; where
    it is None, sinks are read as written.

    The prompt, the first forward of a row, is attended in full, whatever its length. The window applies
    from the next forward on, so a prompt must not be fed together with drafts.

    A row has at most `length - 1 + slack + room` slots, besides those of the current forward. Rows may be
    cut by `slack` positions.
    """

    def __init__(
        self,
        length: int,
        sinks: int,
        rotation: RotateFn | Sequence[RotateFn | None] | None,
        slack: int = 64,
        room: int = 64,
    ) -> None:
        if sinks < 0:
            raise InputError("sinks", "must be >= 0", sinks)
        if length <= sinks:
            raise InputError("length", f"must be > `sinks`, {sinks}", length)
        check_sizes(slack, room)
        super().__init__(sinks, length - 1 - sinks, slack, room)
        self._settings = length, sinks, rotation, slack, room

    def set_rotation(self, rotation: RotateFn | Sequence[RotateFn | None] | None) -> None:
        """Set the rotation of a store before it drops any position."""
        length, sinks, _, *rest = self._settings
        self._settings = length, sinks, rotation, *rest

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Any, Any]:
        """Write [N, H, T, D] at the span; returns sinks, window and the new slots [N, H, S, D]."""
        plan, rotate = self.plan_forward(span), self._layer_rotation(layer)
        is_full = int((plan.start + span.width).max(initial=0)) > self._settings[0]
        is_full = is_full and not span.is_first_write
        plan.writes_sinks = is_full and span.width <= 1 and rotate is not None
        keys, values = super().update(layer, key, value, span)
        if not is_full:
            return keys, values
        attention = plan.memo.get(("attention", key.device))
        if attention is None:
            attention = _SinkAttention(plan, key.device, self._settings[0], self._num_sinks)
            plan.memo["attention", key.device] = attention
        if span.width > 1:
            return _SinkWindowKeys(keys, attention, rotate), TensorKVProxy(values)
        if rotate is not None:
            keys[:, :, : self._num_sinks] = attention.shift_sinks(keys[:, :, : self._num_sinks], rotate)
        return keys, values

    def head_bytes(self, layer: int, head: HeadSize, workload: Workload) -> tuple[int, int]:
        """The final and peak bytes of one head of a layer, to which the rotation of the sinks is nothing."""
        self.set_rotation(None)
        return super().head_bytes(layer, head, workload)

    def _layer_rotation(self, layer: int) -> RotateFn | None:
        rotation = self._settings[2] if self._num_sinks else None
        return rotation[layer] if isinstance(rotation, Sequence) else rotation

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        own, given = self._settings[:2], other._settings[:2]
        if given != own:
            raise InputError("other", f"must have the length and sinks {own}", given)
        super().join(other)


class WindowStore(StoreGroup):
    """By layer all positions (window None), or the last `window - 1` and `slack` more.

    A query sees itself and the `window - 1` positions before it. A windowed layer has at most
    `window - 1 + slack + room` slots per row. A forward that feeds more than that is buffered until the
    commit. Rows may be cut by `slack` positions.
    """

    grows = False

    def __init__(self, windows: Sequence[int | None], slack: int = 64, room: int = 64) -> None:
        if not windows:
            raise InputError("windows", "must name a window or None for each layer", windows)
        if any(window is not None and window < 1 for window in windows):
            raise InputError("windows", "must be >= 1 where they are not None", windows)
        check_sizes(slack, room)
        self._windows, self._sizes = tuple(windows), (slack, room)
        sizes = sorted({window for window in windows if window is not None})
        self._stores: dict[int | None, DenseStore | SinkWindowBlocks] = {
            window: SinkWindowBlocks(0, window - 1, slack, room) for window in sizes
        }
        self.is_padded = None in self._windows
        if self.is_padded:
            self._stores[None] = DenseStore()
        super().__init__(tuple(self._stores.values()))

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(store.nbytes for store in self._stores.values())

    def _layer_store(self, layer: int) -> DenseStore | SinkWindowBlocks:
        """The store of a layer."""
        if layer >= len(self._windows):
            raise InputError("windows", f"must name a window or None for layer {layer} too", self._windows)
        return self._stores[self._windows[layer]]

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns at most `window - 1` slots before it, and the new ones."""
        return self._layer_store(layer).update(layer, key, value, span)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will return for this layer."""
        return self._layer_store(layer).visible_slots(layer, span)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        other = type(self)(self._windows, *self._sizes)
        other._stores = {window: store.select(rows) for window, store in self._stores.items()}
        other.members, other._lengths = tuple(other._stores.values()), self._lengths[rows]
        return other

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(layer for store in self._stores.values() for layer in store.layers)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed slots of rows [N] (host) in a layer, packed; stale behind a row's end."""
        return self._layer_store(layer).read(layer, rows)

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        if other._windows != self._windows:
            raise InputError("other", f"must have the windows {self._windows}", other._windows)
        for window, store in self._stores.items():
            store.join(other._stores[window])  # type: ignore[arg-type]
        self._lengths = torch.cat((self._lengths, other._lengths))

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for store in self._stores.values():
            store.to(device)

    def state(self) -> dict[str, Tensor]:
        """The committed content by window and layer."""
        return {
            f"{window or 'full'}.{name}": value
            for window, store in self._stores.items()
            for name, value in store.state().items()
        } | {"lengths": self.lengths.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store with the same settings."""
        for window, store in self._stores.items():
            prefix = f"{window or 'full'}."
            store.load(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
        self._lengths = state["lengths"].cpu().long().clone()
