"""The first and the latest positions of rows, in memory that does not grow with their length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, Reach, Span
from descant.errors import InputError
from descant.kv_cache.prefill_buffer import Aside, Pair, grown, picked
from descant.kv_cache.prefix_groups import Kin

__all__ = ["Plan", "Recent"]

# Blocks start with so many free slots: few rows need all that they may come to take.
_STEP = 64


@dataclass
class Plan:
    """What a forward comes to: found once, for all layers (host)."""

    span: Span
    rows: Array  # [N] which are fed
    start: Array  # [N] the position that each is fed from
    first: Array  # [N] the slot that each is written from
    skip: Array  # [N] how many slots behind the head are not shown
    held: Array  # [N] how many slots are shown before those that are written
    aside: Aside | None  # where the rows are not written to a block

    @cached_property
    def size(self) -> int:
        """How many slots are shown."""
        return int(self.held.max(initial=0)) + self.span.width

    @cached_property
    def stop(self) -> int:
        """How many slots a block must have."""
        return int(self.first.max(initial=0)) + self.span.width

    @cached_property
    def at(self) -> int | None:
        """The slot from which all rows of the table are written; None: they differ, or only some are."""
        return None if self.span.rows is not None else _one(self.first)

    @cached_property
    def past(self) -> int | None:
        """How many slots all rows skip; None: they differ."""
        return _one(self.skip)


class _Place(NamedTuple):
    """A plan on a device."""

    plan: Plan
    rows: Tensor  # [N]
    written: Tensor  # [N, T]
    shown: Tensor  # [N, S]


class Recent:
    """Of every row the first `head` positions and no fewer than the last `keep + slack`.

    Keys and values are [rows, heads, slots, dim] a layer. A position below `head` lies in the slot of that
    number, any other so many slots before it as its row has a `gap`: what it forgot. A query is shown the
    head and the last `keep` positions before it; the slack is there so that rows can be cut. Rows are
    trimmed when they are committed, every `room` positions and then all of them: so rows that stand level
    stay so, and are shown without a copy where there is no head.
    """

    def __init__(self, head: int, keep: int, slack: int, room: int = 64) -> None:
        self._sizes = head, keep, slack, room
        self._head, self._shown = head, head + keep
        self._least = head + keep + slack  # what a row is trimmed to
        self._most = self._least + room  # what a block has slots for
        self._full = self._most - room // 4  # with more than that a row is trimmed
        self.rewind: int | None = slack
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._gap: Array = np.zeros(0, dtype=np.int64)
        self._blocks: dict[int, Pair] = {}
        self._aside: list[Aside] = []
        self._lent: dict[int, tuple[int, Pair]] = {}  # by layer what a head was laid over, and its first slot
        self._kin = Kin()
        self.moved = 0  # slots of keys and values copied between rows, for reports and tests
        self._plan: Plan | None = None
        self._placed: dict[torch.device, _Place] = {}

    def __len__(self) -> int:
        return len(self._gap)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        held = [*self._blocks.values(), *(pair for part in self._aside for pair in part.content.values())]
        return sum(one.nbytes for pair in held for one in pair)

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._gap = np.concatenate((self._gap, np.zeros(rows, dtype=np.int64)))
        self._kin.extend(rows)
        self._plan = None

    # -------------------------------------------------------------------- one forward
    def reach(self, layer: int, span: Span) -> Reach:  # noqa: ARG002 - all layers are alike
        """What `update` is about to show."""
        plan = self.plan(span)
        return Reach(torch.from_numpy(plan.held), plan.size)

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span, own: bool = False) -> Pair:
        """Write [N, H, T, D] at the span; what a query of its rows is shown [N, H, S, D], packed.

        With `own` the head that is shown may be written to until the layer's next update, or the next commit.
        """
        plan = self.plan(span)
        self._restore(layer)
        if plan.aside is not None:
            if not plan.aside.content:
                self._aside.append(plan.aside)
            plan.aside.take(layer, (key, value))
            return key, value
        pair = self._room(layer, (key, value), plan.stop)
        if plan.at is not None:
            for block, new in zip(pair, (key, value), strict=True):
                block[: len(self), :, plan.at : plan.at + span.width] = new
        else:
            place = self._place(plan, key.device)
            for block, new in zip(pair, (key, value), strict=True):
                block[place.rows[:, None], :, place.written] = new.transpose(1, 2)
        return (key, value) if span.fresh else self._look(layer, pair, plan, own)

    def plan(self, span: Span) -> Plan:
        """What a forward comes to."""
        if self._plan is None or self._plan.span is not span:
            self._plan = self._planned(span)
        return self._plan

    def _planned(self, span: Span) -> Plan:
        rows, start = span.on_host(len(self))
        if any(np.isin(part.rows, rows).any() for part in self._aside):
            self._settle()
        gap, aside = self._gap[rows], None
        if span.fresh and (span.width > self._most or gap.any()):
            # Of what is certain to be kept the beginning is never needed again.
            sure = np.zeros_like(rows) if span.sure is None else span.sure.numpy()
            spare = np.maximum(sure - self._least, 0)
            aside = Aside(rows, spare if spare.all() else np.zeros_like(spare), self._head)
            gap = np.zeros_like(gap)
        self._check(start, gap)
        first = start - gap
        skip = np.maximum(first - self._shown, 0)
        return Plan(span, rows, start, first, skip, first - skip, aside)

    def _check(self, lengths: Array, gap: Array) -> None:
        """Refuse rows that would go on where what they need before is forgotten."""
        lost = (gap > 0) & (lengths < gap + self._shown)
        if lost.any():
            row = int(lost.argmax())
            raise InputError(
                "lengths",
                f"must leave row {row} at least {int(gap[row]) + self._shown} positions, for it forgot "
                "what lies before those",
                int(lengths[row]),
                f"cut no more than {self._sizes[2]}, or give more slack",
            )

    def _place(self, plan: Plan, device: torch.device) -> _Place:
        """A plan on a layer's device, found once a device and forward."""
        known = self._placed.get(device)
        if known is None or known.plan is not plan:
            rows, first, skip = (
                torch.from_numpy(one).to(device, non_blocking=True)
                for one in (plan.rows, plan.first, plan.skip)
            )
            slots = torch.arange(plan.size, device=device)
            known = self._placed[device] = _Place(
                plan,
                rows,
                first[:, None] + torch.arange(plan.span.width, device=device),
                slots + skip[:, None] * (slots >= self._head),
            )
        return known

    def _look(self, layer: int, pair: Pair, plan: Plan, own: bool) -> Pair:
        """What the fed rows are shown: a slice of the blocks where they lie alike, else a copy."""
        keys, values = pair
        if plan.past is None or plan.span.rows is not None:
            place = self._place(plan, keys.device)
            return picked(keys, place.rows, place.shown), picked(values, place.rows, place.shown)
        shown = slice(plan.past, plan.past + plan.size)
        keys, values = keys[: len(self), :, shown], values[: len(self), :, shown]
        if self._head and (own or plan.past):
            # The head is laid over what comes just before the rest; what lay there comes back later.
            under = slice(0, self._head)
            self._lent[layer] = plan.past, (keys[:, :, under].clone(), values[:, :, under].clone())
            if plan.past:
                for block, one in zip(pair, (keys, values), strict=True):
                    one[:, :, under] = block[: len(self), :, under].clone()
        return keys, values

    def _restore(self, layer: int | None = None) -> None:
        """Put back what a head was laid over, in a layer or in all."""
        if layer is None:
            for lender in list(self._lent):
                self._restore(lender)
        elif layer in self._lent:
            first, lent = self._lent.pop(layer)
            for block, one in zip(self._blocks[layer], lent, strict=True):
                block[: one.shape[0], :, first : first + self._head] = one

    def _room(self, layer: int, like: Pair, slots: int) -> Pair:
        """The layer's blocks with room for all rows and so many slots."""
        rows, pair = len(self), self._blocks.get(layer)
        if pair is not None and pair[0].shape[0] >= rows and pair[0].shape[2] >= slots:
            return pair
        if pair is None:
            wide = max(slots, min(slots + _STEP, self._most))
            keys, values = (one.new_zeros(rows, one.shape[1], wide, one.shape[3]) for one in like)
        else:
            have = pair[0].shape[2]
            wide = have if slots <= have else max(slots, min(slots + have // 2 + _STEP, self._most))
            keys, values = (grown(one, rows, wide) for one in pair)
        self._blocks[layer] = keys, values
        return keys, values

    def _settle(self) -> None:
        """Write what was kept aside to the blocks, for it is read again before it was committed."""
        parts, self._aside = self._aside, []
        self._restore()
        for part in parts:
            self._gap[part.rows] = part.gap
            for layer, new in part.content.items():
                self._put(layer, part.rows, new)

    def _put(self, layer: int, rows: Array, pair: Pair) -> None:
        """Write the first slots of some rows."""
        for block, new in zip(self._room(layer, pair, pair[0].shape[2]), pair, strict=True):
            block[torch.from_numpy(rows).to(new.device), :, : new.shape[2]] = new

    # -------------------------------------------------------------------- between forwards
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and what it needs no more is forgotten."""
        self._restore()
        count, long = len(lengths), lengths.numpy()
        whence = np.arange(count) if parents is None else parents.numpy()
        gap, moves = self._gap[whence], whence != np.arange(count)
        read: list[tuple[Aside, Array, Array]] = []
        for part in self._aside:
            into, lines = part.onto(whence)
            least = np.maximum(long[into] - self._least, part.gap[lines])
            gap[into], moves[into] = np.where(long[into] > 0, least, 0), False
            read.append((part, into, lines))
        self._check(long, gap)
        ends = long - gap
        # All is read before anything is written: a source may be another move's target.
        new = [
            (into, part.read(lines, gap[into], int(ends[into].max())))
            for part, into, lines in read
            if len(into)
        ]
        if moves.any():
            into = moves.nonzero()[0]
            self._move(whence[into], into, gap[into], ends[into])
        self._gap, self._lengths = gap, lengths
        self._kin.follow(None if parents is None else whence, long)
        for into, layers in new:
            for layer, pair in layers.items():
                self._put(layer, into, pair)
        self._aside, self._plan = [], None
        self._trim()

    def _move(self, source: Array, into: Array, gap: Array, ends: Array) -> None:
        """Copy rows of the blocks; of one that takes the place of its kin what they have not in common."""
        stop, old = int(ends.max()), len(self)
        common = self._kin.shared(into, source) - gap
        alike = (common > 0) & (self._gap[np.minimum(into, old - 1)] == gap)
        parts = []
        for which in (alike, ~alike):  # two copies at the most, each of one slice of slots
            start = (int(common[which].min()) if which is alike else 0) if which.any() else stop
            if start < stop:
                parts.append((into[which], source[which], slice(start, stop)))
                self.moved += int(which.sum()) * (stop - start)
        for layer, pair in self._blocks.items():
            device = pair[0].device
            places = [
                (torch.from_numpy(to).to(device), torch.from_numpy(of).to(device), at) for to, of, at in parts
            ]
            keys, values = (grown(one, max(old, int(into.max()) + 1), 0) for one in pair)
            for block in (keys, values):
                content = [block[of, :, at] for _, of, at in places]
                for (to, _, at), one in zip(places, content, strict=True):
                    block[to, :, at] = one
            self._blocks[layer] = keys, values

    def _trim(self) -> None:
        """Forget what no row needs, where one has little room left."""
        ends = self._lengths.numpy() - self._gap
        if int(ends.max(initial=0)) > self._full:
            surplus = np.maximum(ends - self._least, 0)
            which = surplus.nonzero()[0]
            slots = np.arange(self._least)
            shown = slots + surplus[which][:, None] * (slots >= self._head)
            for layer, pair in self._blocks.items():
                rows = torch.from_numpy(which).to(pair[0].device)
                index = torch.from_numpy(shown).to(pair[0].device)
                for block in self._room(layer, pair, 0):
                    block[rows, :, : self._least] = picked(block, rows, index)
            self._gap = self._gap + surplus
        for layer, pair in self._blocks.items():
            if pair[0].shape[2] > self._most:
                keys, values = (one[:, :, : self._most].clone() for one in pair)
                self._blocks[layer] = keys, values

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._blocks)

    def read(self, layer: int, rows: Tensor) -> Pair:
        """What these rows [N] (host) hold of a layer as last committed, packed, stale behind a row's end."""
        self._restore()
        stop = int((self._lengths.numpy() - self._gap)[rows.numpy()].max(initial=0))
        keys, values = (
            one[rows.to(one.device), :, :stop] for one in self._room(layer, self._blocks[layer], 0)
        )
        return keys, values

    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        self._restore()
        other = type(self)(*self._sizes)
        other._lengths, other._gap = self._lengths[rows].clone(), self._gap[rows.numpy()]
        other._kin = self._kin.select(rows.numpy(), other._lengths.numpy())
        for layer, pair in self._blocks.items():
            keys, values = (one[rows.to(one.device)] for one in self._room(layer, pair, 0))
            other._blocks[layer] = keys, values
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        self._restore()
        other._restore()
        first, count = len(self), len(other)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._gap = np.concatenate((self._gap, other._gap))
        self._kin.join(other._kin)
        self._plan = None
        stop = int((other._lengths.numpy() - other._gap).max(initial=0))
        for layer, pair in other._blocks.items():
            for block, one in zip(self._room(layer, pair, stop), pair, strict=True):
                block[first : first + count, :, :stop] = one[:count, :, :stop]

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._restore()
        for layer, (keys, values) in self._blocks.items():
            self._blocks[layer] = keys.to(device), values.to(device)
        self._placed = {}

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: lengths, gaps, and a block of keys and one of values a layer."""
        self._restore()
        stop = int((self._lengths.numpy() - self._gap).max(initial=0))
        state = {"lengths": self._lengths.clone(), "gaps": torch.from_numpy(self._gap.copy())}
        for layer, pair in self._blocks.items():
            for name, block in zip(("keys", "values"), self._room(layer, pair, 0), strict=True):
                state[f"{name}.{layer}"] = block[: len(self), :, :stop].clone(
                    memory_format=torch.contiguous_format
                )
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty one."""
        self._lengths = state["lengths"].long().cpu().clone()
        self._gap = state["gaps"].long().cpu().numpy().copy()
        self._check(self._lengths.numpy(), self._gap)
        self._kin.extend(len(self))
        for name, keys in state.items():
            kind, _, layer = name.partition(".")
            if kind == "keys":
                values = state[f"values.{layer}"]
                self._blocks[int(layer)] = keys.clone(), values.clone()


def _one(numbers: Array) -> int | None:
    """The number that all are; None where they differ or there is none."""
    return int(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else None
