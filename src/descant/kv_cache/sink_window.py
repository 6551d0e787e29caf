"""The first and the latest positions of rows, in memory that does not grow with their length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.prefill_buffer import KVPair, PrefillBuffer, gather_slots, grow_block
from descant.kv_cache.prefix_groups import PrefixGroups

__all__ = ["SinkWindowBlocks", "SinkWindowPlan"]

# Blocks start with so many free slots: few rows need all that they may come to take.
_GROWTH_STEP = 64


@dataclass
class SinkWindowPlan:
    """What a forward comes to: found once, for all layers (host)."""

    span: KVSpan
    rows: Array  # [N] which are fed
    start: Array  # [N] the position that each is fed from
    write_start: Array  # [N] the slot that each is written from
    num_skipped: Array  # [N] how many slots behind the head are not shown
    past_lengths: Array  # [N] how many slots are shown before those that are written
    prefill_buffer: PrefillBuffer | None  # where the rows are not written to a block

    @cached_property
    def num_slots(self) -> int:
        """How many slots are shown."""
        return int(self.past_lengths.max(initial=0)) + self.span.width

    @cached_property
    def required_slots(self) -> int:
        """How many slots a block must have."""
        return int(self.write_start.max(initial=0)) + self.span.width

    @cached_property
    def common_write_start(self) -> int | None:
        """The slot from which all rows of the table are written; None: they differ, or only some are."""
        return None if self.span.rows is not None else _common_value(self.write_start)

    @cached_property
    def common_skip(self) -> int | None:
        """How many slots all rows skip; None: they differ."""
        return _common_value(self.num_skipped)


class _SinkWindowIndex(NamedTuple):
    """A plan on a device."""

    plan: SinkWindowPlan
    rows: Tensor  # [N]
    write_slots: Tensor  # [N, T]
    read_slots: Tensor  # [N, S]


class SinkWindowBlocks:
    """Of every row the first `head` positions and no fewer than the last `keep + slack`.

    Keys and values are [rows, heads, slots, dim] a layer. A position below `head` lies in the slot of that
    number, any other so many slots before it as its row has a `gap`: what it forgot. A query is shown the
    head and the last `keep` positions before it; the slack is there so that rows can be cut. Rows are
    trimmed when they are committed, every `room` positions and then all of them: so rows that stand level
    stay so, and are shown without a copy where there is no head.
    """

    def __init__(self, head: int, keep: int, slack: int, room: int = 64) -> None:
        self._init_args = head, keep, slack, room
        self._num_sinks, self._max_visible = head, head + keep
        self._trimmed_size = head + keep + slack  # what a row is trimmed to
        self._max_slots = self._trimmed_size + room  # what a block has slots for
        self._trim_threshold = self._max_slots - room // 4  # with more than that a row is trimmed
        self.max_rewind: int | None = slack
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._num_dropped: Array = np.zeros(0, dtype=np.int64)
        self._blocks: dict[int, KVPair] = {}
        self._prefill_buffers: list[PrefillBuffer] = []
        self._saved_slots: dict[
            int, tuple[int, KVPair]
        ] = {}  # by layer what a head was laid over, and its first slot
        self._prefix_groups = PrefixGroups()
        self.copied_slots = 0  # slots of keys and values copied between rows, for reports and tests
        self._plan: SinkWindowPlan | None = None
        self._index_by_device: dict[torch.device, _SinkWindowIndex] = {}

    def __len__(self) -> int:
        return len(self._num_dropped)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        held = [
            *self._blocks.values(),
            *(pair for part in self._prefill_buffers for pair in part.layers.values()),
        ]
        return sum(one.nbytes for pair in held for one in pair)

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._num_dropped = np.concatenate((self._num_dropped, np.zeros(rows, dtype=np.int64)))
        self._prefix_groups.extend(rows)
        self._plan = None

    # -------------------------------------------------------------------- one forward
    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots:  # noqa: ARG002 - all layers are alike
        """What `update` is about to show."""
        plan = self.plan(span)
        return VisibleSlots(torch.from_numpy(plan.past_lengths), plan.num_slots)

    def update(
        self, layer: int, key: Tensor, value: Tensor, span: KVSpan, writable_sinks: bool = False
    ) -> KVPair:
        """Write [N, H, T, D] at the span; what a query of its rows is shown [N, H, S, D], packed.

        With `own` the head that is shown may be written to until the layer's next update, or the next commit.
        """
        plan = self.plan(span)
        self._restore_slots(layer)
        if plan.prefill_buffer is not None:
            if not plan.prefill_buffer.layers:
                self._prefill_buffers.append(plan.prefill_buffer)
            plan.prefill_buffer.write(layer, (key, value))
            return key, value
        pair = self._ensure_capacity(layer, (key, value), plan.required_slots)
        if plan.common_write_start is not None:
            for block, new in zip(pair, (key, value), strict=True):
                block[: len(self), :, plan.common_write_start : plan.common_write_start + span.width] = new
        else:
            place = self._device_index(plan, key.device)
            for block, new in zip(pair, (key, value), strict=True):
                block[place.rows[:, None], :, place.write_slots] = new.transpose(1, 2)
        return (key, value) if span.is_first_write else self._visible_kv(layer, pair, plan, writable_sinks)

    def plan(self, span: KVSpan) -> SinkWindowPlan:
        """What a forward comes to."""
        if self._plan is None or self._plan.span is not span:
            self._plan = self._make_plan(span)
        return self._plan

    def _make_plan(self, span: KVSpan) -> SinkWindowPlan:
        rows, start = span.on_host(len(self))
        if any(np.isin(part.rows, rows).any() for part in self._prefill_buffers):
            self._flush_prefills()
        gap, aside = self._num_dropped[rows], None
        if span.is_first_write and (span.width > self._max_slots or gap.any()):
            # Of what is certain to be kept the beginning is never needed again.
            sure = np.zeros_like(rows) if span.num_committed is None else span.num_committed.numpy()
            spare = np.maximum(sure - self._trimmed_size, 0)
            aside = PrefillBuffer(rows, spare if spare.all() else np.zeros_like(spare), self._num_sinks)
            gap = np.zeros_like(gap)
        self._check_rewind(start, gap)
        first = start - gap
        skip = np.maximum(first - self._max_visible, 0)
        return SinkWindowPlan(span, rows, start, first, skip, first - skip, aside)

    def _check_rewind(self, lengths: Array, gap: Array) -> None:
        """Refuse rows that would go on where what they need before is forgotten."""
        lost = (gap > 0) & (lengths < gap + self._max_visible)
        if lost.any():
            row = int(lost.argmax())
            raise InputError(
                "lengths",
                f"must leave row {row} at least {int(gap[row]) + self._max_visible} positions, for it forgot "
                "what lies before those",
                int(lengths[row]),
                f"cut no more than {self._init_args[2]}, or give more slack",
            )

    def _device_index(self, plan: SinkWindowPlan, device: torch.device) -> _SinkWindowIndex:
        """A plan on a layer's device, found once a device and forward."""
        known = self._index_by_device.get(device)
        if known is None or known.plan is not plan:
            rows, first, skip = (
                torch.from_numpy(one).to(device, non_blocking=True)
                for one in (plan.rows, plan.write_start, plan.num_skipped)
            )
            slots = torch.arange(plan.num_slots, device=device)
            known = self._index_by_device[device] = _SinkWindowIndex(
                plan,
                rows,
                first[:, None] + torch.arange(plan.span.width, device=device),
                slots + skip[:, None] * (slots >= self._num_sinks),
            )
        return known

    def _visible_kv(self, layer: int, pair: KVPair, plan: SinkWindowPlan, own: bool) -> KVPair:
        """What the fed rows are shown: a slice of the blocks where they lie alike, else a copy."""
        keys, values = pair
        if plan.common_skip is None or plan.span.rows is not None:
            place = self._device_index(plan, keys.device)
            return gather_slots(keys, place.rows, place.read_slots), gather_slots(
                values, place.rows, place.read_slots
            )
        shown = slice(plan.common_skip, plan.common_skip + plan.num_slots)
        keys, values = keys[: len(self), :, shown], values[: len(self), :, shown]
        if self._num_sinks and (own or plan.common_skip):
            # The head is laid over what comes just before the rest; what lay there comes back later.
            under = slice(0, self._num_sinks)
            self._saved_slots[layer] = (
                plan.common_skip,
                (keys[:, :, under].clone(), values[:, :, under].clone()),
            )
            if plan.common_skip:
                for block, one in zip(pair, (keys, values), strict=True):
                    one[:, :, under] = block[: len(self), :, under].clone()
        return keys, values

    def _restore_slots(self, layer: int | None = None) -> None:
        """Put back what a head was laid over, in a layer or in all."""
        if layer is None:
            for lender in list(self._saved_slots):
                self._restore_slots(lender)
        elif layer in self._saved_slots:
            first, lent = self._saved_slots.pop(layer)
            for block, one in zip(self._blocks[layer], lent, strict=True):
                block[: one.shape[0], :, first : first + self._num_sinks] = one

    def _ensure_capacity(self, layer: int, like: KVPair, slots: int) -> KVPair:
        """The layer's blocks with room for all rows and so many slots."""
        rows, pair = len(self), self._blocks.get(layer)
        if pair is not None and pair[0].shape[0] >= rows and pair[0].shape[2] >= slots:
            return pair
        if pair is None:
            wide = max(slots, min(slots + _GROWTH_STEP, self._max_slots))
            keys, values = (one.new_zeros(rows, one.shape[1], wide, one.shape[3]) for one in like)
        else:
            have = pair[0].shape[2]
            wide = (
                have if slots <= have else max(slots, min(slots + have // 2 + _GROWTH_STEP, self._max_slots))
            )
            keys, values = (grow_block(one, rows, wide) for one in pair)
        self._blocks[layer] = keys, values
        return keys, values

    def _flush_prefills(self) -> None:
        """Write what was kept aside to the blocks, for it is read again before it was committed."""
        parts, self._prefill_buffers = self._prefill_buffers, []
        self._restore_slots()
        for part in parts:
            self._num_dropped[part.rows] = part.num_dropped
            for layer, new in part.layers.items():
                self._write_first_slots(layer, part.rows, new)

    def _write_first_slots(self, layer: int, rows: Array, pair: KVPair) -> None:
        """Write the first slots of some rows."""
        for block, new in zip(self._ensure_capacity(layer, pair, pair[0].shape[2]), pair, strict=True):
            block[torch.from_numpy(rows).to(new.device), :, : new.shape[2]] = new

    # -------------------------------------------------------------------- between forwards
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and what it needs no more is forgotten."""
        self._restore_slots()
        count, long = len(lengths), lengths.numpy()
        whence = np.arange(count) if parents is None else parents.numpy()
        gap, moves = self._num_dropped[whence], whence != np.arange(count)
        read: list[tuple[PrefillBuffer, Array, Array]] = []
        for part in self._prefill_buffers:
            into, lines = part.find_children(whence)
            least = np.maximum(long[into] - self._trimmed_size, part.num_dropped[lines])
            gap[into], moves[into] = np.where(long[into] > 0, least, 0), False
            read.append((part, into, lines))
        self._check_rewind(long, gap)
        ends = long - gap
        # All is read before anything is written: a source may be another move's target.
        new = [
            (into, part.read(lines, gap[into], int(ends[into].max())))
            for part, into, lines in read
            if len(into)
        ]
        if moves.any():
            into = moves.nonzero()[0]
            self._move_rows(whence[into], into, gap[into], ends[into])
        self._num_dropped, self._lengths = gap, lengths
        self._prefix_groups.commit(None if parents is None else whence, long)
        for into, layers in new:
            for layer, pair in layers.items():
                self._write_first_slots(layer, into, pair)
        self._prefill_buffers, self._plan = [], None
        self._trim()

    def _move_rows(self, source: Array, into: Array, gap: Array, ends: Array) -> None:
        """Copy rows of the blocks; of one that takes the place of its kin what they have not in common."""
        stop, old = int(ends.max()), len(self)
        common = self._prefix_groups.shared_length(into, source) - gap
        alike = (common > 0) & (self._num_dropped[np.minimum(into, old - 1)] == gap)
        parts = []
        for which in (alike, ~alike):  # two copies at the most, each of one slice of slots
            start = (int(common[which].min()) if which is alike else 0) if which.any() else stop
            if start < stop:
                parts.append((into[which], source[which], slice(start, stop)))
                self.copied_slots += int(which.sum()) * (stop - start)
        for layer, pair in self._blocks.items():
            device = pair[0].device
            places = [
                (torch.from_numpy(to).to(device), torch.from_numpy(of).to(device), at) for to, of, at in parts
            ]
            keys, values = (grow_block(one, max(old, int(into.max()) + 1), 0) for one in pair)
            for block in (keys, values):
                content = [block[of, :, at] for _, of, at in places]
                for (to, _, at), one in zip(places, content, strict=True):
                    block[to, :, at] = one
            self._blocks[layer] = keys, values

    def _trim(self) -> None:
        """Forget what no row needs, where one has little room left."""
        ends = self._lengths.numpy() - self._num_dropped
        if int(ends.max(initial=0)) > self._trim_threshold:
            surplus = np.maximum(ends - self._trimmed_size, 0)
            which = surplus.nonzero()[0]
            slots = np.arange(self._trimmed_size)
            shown = slots + surplus[which][:, None] * (slots >= self._num_sinks)
            for layer, pair in self._blocks.items():
                rows = torch.from_numpy(which).to(pair[0].device)
                index = torch.from_numpy(shown).to(pair[0].device)
                for block in self._ensure_capacity(layer, pair, 0):
                    block[rows, :, : self._trimmed_size] = gather_slots(block, rows, index)
            self._num_dropped = self._num_dropped + surplus
        for layer, pair in self._blocks.items():
            if pair[0].shape[2] > self._max_slots:
                keys, values = (one[:, :, : self._max_slots].clone() for one in pair)
                self._blocks[layer] = keys, values

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._blocks)

    def read(self, layer: int, rows: Tensor) -> KVPair:
        """What these rows [N] (host) hold of a layer as last committed, packed, stale behind a row's end."""
        self._restore_slots()
        stop = int((self._lengths.numpy() - self._num_dropped)[rows.numpy()].max(initial=0))
        keys, values = (
            one[rows.to(one.device), :, :stop] for one in self._ensure_capacity(layer, self._blocks[layer], 0)
        )
        return keys, values

    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        self._restore_slots()
        other = type(self)(*self._init_args)
        other._lengths, other._num_dropped = self._lengths[rows].clone(), self._num_dropped[rows.numpy()]
        other._prefix_groups = self._prefix_groups.select(rows.numpy(), other._lengths.numpy())
        for layer, pair in self._blocks.items():
            keys, values = (one[rows.to(one.device)] for one in self._ensure_capacity(layer, pair, 0))
            other._blocks[layer] = keys, values
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._restore_slots()
        other._restore_slots()
        first, count = len(self), len(other)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._num_dropped = np.concatenate((self._num_dropped, other._num_dropped))
        self._prefix_groups.join(other._prefix_groups)
        self._plan = None
        stop = int((other._lengths.numpy() - other._num_dropped).max(initial=0))
        for layer, pair in other._blocks.items():
            for block, one in zip(self._ensure_capacity(layer, pair, stop), pair, strict=True):
                block[first : first + count, :, :stop] = one[:count, :, :stop]

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._restore_slots()
        for layer, (keys, values) in self._blocks.items():
            self._blocks[layer] = keys.to(device), values.to(device)
        self._index_by_device = {}

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: lengths, gaps, and a block of keys and one of values a layer."""
        self._restore_slots()
        stop = int((self._lengths.numpy() - self._num_dropped).max(initial=0))
        state = {"lengths": self._lengths.clone(), "gaps": torch.from_numpy(self._num_dropped.copy())}
        for layer, pair in self._blocks.items():
            for name, block in zip(("keys", "values"), self._ensure_capacity(layer, pair, 0), strict=True):
                state[f"{name}.{layer}"] = block[: len(self), :, :stop].clone(
                    memory_format=torch.contiguous_format
                )
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty one."""
        self._lengths = state["lengths"].long().cpu().clone()
        self._num_dropped = state["gaps"].long().cpu().numpy().copy()
        self._check_rewind(self._lengths.numpy(), self._num_dropped)
        self._prefix_groups.extend(len(self))
        for name, keys in state.items():
            kind, _, layer = name.partition(".")
            if kind == "keys":
                values = state[f"values.{layer}"]
                self._blocks[int(layer)] = keys.clone(), values.clone()


def _common_value(numbers: Array) -> int | None:
    """The number that all are; None where they differ or there is none."""
    return int(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else None
