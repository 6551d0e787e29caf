"""How rows that share blocks are read: what they share once for all of them, then what is each one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, Span
from descant.kv_cache.attention_proxy import Attention, Lazy
from descant.kv_cache.block_pool import Pool

__all__ = ["Plan", "Shared"]

# What rows share is attended by itself from so many slots on: below, a gather is as cheap.
_WORTH = 64
# What is added to the score of a key that is not seen, in any precision.
_UNSEEN = -30000.0


class Run(NamedTuple):
    """Blocks that several rows share, which are read once for all of them."""

    rows: Array  # [G] lines of the forward
    first: int  # its slots
    stop: int


@dataclass
class Plan:
    """How the rows of one forward lie in the pool: found once on the host, used by every layer."""

    pool: Pool
    table: Array  # [N, M]
    stop: int  # how many slots are read
    span: Span | None = None
    starts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [N]
    written: tuple[Array, Array] | None = None  # arena and slot of every position that is written [N * T]
    _runs: list[Run] | None = None
    _kept: dict[Any, Any] = field(default_factory=dict)

    def writes(self, device: torch.device) -> Sequence[tuple[int, Tensor | None, Tensor]]:
        """For each arena that is written: which of the fed positions (None: all) go to which slots."""
        if ("writes", device) not in self._kept:
            assert self.written is not None
            self._kept["writes", device] = _parted(*self.written, device)
        found: Sequence[tuple[int, Tensor | None, Tensor]] = self._kept["writes", device]
        return found

    # -------------------------------------------------------------------- reading
    @property
    def runs(self) -> list[Run]:
        """What rows share, as far as it is worth a look of its own, what comes first first."""
        if self._runs is None:
            self._runs = []
            self._share(np.arange(len(self.table)), 0, 0)
        return self._runs

    def _share(self, rows: Array, first: int, at: int) -> None:
        """Find what lines share that are alike from block `first`, where no run ends, up to block `at`."""
        size = self.pool.block
        # What a line writes to is its own.
        rows = rows[self.starts[rows] // size > at]
        if len(rows) < 2:
            return
        for number in np.unique(self.table[rows, at]):
            some = rows[self.table[rows, at] == number]
            if len(some) < 2:
                continue
            lines = self.table[some, at : int(self.starts[some].min()) // size]
            same = (lines == lines[0]).all(0)
            end, begin = at + (lines.shape[1] if same.all() else int(same.argmin())), first
            assert self._runs is not None
            if (end - first) * size >= _WORTH:
                self._runs.append(Run(some, first * size, end * size))
                begin = end
            self._share(some, begin, end)

    @cached_property
    def tails(self) -> Array:
        """The first slot of each line that no run reads [N]."""
        tails = np.zeros(len(self.table), dtype=np.int64)
        for run in self.runs:
            tails[run.rows] = run.stop
        return tails

    def sharing(self, run: Run, device: torch.device) -> Tensor | None:
        """The lines that share a run, on a device; None: all of them."""
        if len(run.rows) == len(self.table):
            return None
        key = ("lines", run.first, int(run.rows[0]), device)
        if key not in self._kept:
            self._kept[key] = torch.from_numpy(run.rows).to(device, non_blocking=True)
        lines: Tensor = self._kept[key]
        return lines

    def apart(self, device: torch.device) -> Tensor | None:
        """The slots that tails read [N, S], on a device; None where they all begin alike."""
        if (self.tails == self.tails[0]).all():
            return None
        if ("apart", device) not in self._kept:
            self._kept["apart", device] = torch.from_numpy(self._behind()).to(device, non_blocking=True)
        slots: Tensor = self._kept["apart", device]
        return slots

    def _behind(self) -> Array:
        """The slots of every line from its tail on, as many as the longest has [N, S]."""
        return self.tails[:, None] + np.arange(self.stop - int(self.tails.min()))

    def gathered(self, name: str, layer: int) -> Tensor:
        """All slots of all lines [N, H, S, D]; a view where they lie in a row."""
        if "slots" not in self._kept:
            self._kept["slots"] = self._slots(0, self.stop, slice(None))
        return self._read(name, layer, self._kept["slots"])

    def shared(self, name: str, layer: int, run: Run) -> Tensor:
        """The slots of a run [1, H, S, D]."""
        key = ("run", run.first, int(run.rows[0]))
        if key not in self._kept:
            self._kept[key] = self._slots(run.first, run.stop, run.rows[:1])
        return self._read(name, layer, self._kept[key])

    def tail(self, name: str, layer: int) -> Tensor:
        """What no run reads of every line, from its own first slot on [N, H, S, D]."""
        if "tail" not in self._kept:
            at, size = self._behind(), self.pool.block
            blocks = np.take_along_axis(self.table, np.minimum(at // size, self.table.shape[1] - 1), 1)
            self._kept["tail"] = self._placed(blocks, at % size)
        return self._read(name, layer, self._kept["tail"])

    def _slots(self, first: int, stop: int, lines: Any) -> _Slots:
        size = self.pool.block
        at = np.arange(first, stop)
        return self._placed(self.table[lines][:, at // size], np.broadcast_to(at % size, (1, len(at))))

    def _placed(self, blocks: Array, inner: Array) -> _Slots:
        """Where these slots of these blocks lie [N, S]; a block that is not there reads as any other."""
        blocks = np.where(blocks < 0, blocks.max(initial=0), blocks)
        arena, slot = self.pool.arena[blocks], self.pool.local[blocks] * self.pool.block + inner
        whole = None
        if len(blocks) == 1 and (arena == arena[0, 0]).all() and (np.diff(slot[0]) == 1).all():
            whole = slice(int(slot[0, 0]), int(slot[0, -1]) + 1)
        return _Slots(arena.shape, int(arena[0, 0]), whole, (arena.ravel(), slot.ravel()), {})

    def _read(self, name: str, layer: int, slots: _Slots) -> Tensor:
        store: dict[int, Tensor] = getattr(self.pool.arenas[slots.arena], name)
        if slots.whole is not None:
            return store[layer][:, slots.whole][None]
        like = store[layer] if layer in store else self._any(name, layer)
        if like.device not in slots.parts:
            slots.parts[like.device] = _parted(*slots.places, like.device)
        parts = slots.parts[like.device]
        if len(parts) == 1 and layer in store:
            found = _picked(like, parts[0][2], self.pool.arenas[slots.arena].blocks * self.pool.block)
        else:
            found = like.new_zeros(like.shape[0], len(slots.places[0]), like.shape[2])
            for number, lines, places in parts:
                arena = self.pool.arenas[number]
                held = getattr(arena, name).get(layer)
                if held is not None:  # a layer that has not written there yet shows nothing
                    at = slice(None) if lines is None else lines
                    found[:, at] = _picked(held, places, arena.blocks * self.pool.block)
        return found.view(like.shape[0], *slots.shape, like.shape[2]).transpose(0, 1)

    def _any(self, name: str, layer: int) -> Tensor:
        """Any tensor of a layer, for its shape."""
        held: list[dict[int, Tensor]] = [getattr(arena, name) for arena in self.pool.arenas.values()]
        return next(store[layer] for store in held if layer in store)


class _Slots(NamedTuple):
    """Where some slots [N, S] lie."""

    shape: tuple[int, ...]
    arena: int  # of the first
    whole: slice | None  # in that arena, where they are one line that lies in a row
    places: tuple[Array, Array]  # arena and slot of each
    parts: dict[torch.device, Any]


class Shared(Lazy):
    """One layer's keys or values of the rows of a forward, which may share some.

    A run that several rows share is attended once, by all their queries together, and merged with what each
    has by itself by the logarithm of the sum of weights (Juravsky et al. 2024, Hydragen).
    """

    def __init__(self, shape: Sequence[int], like: Tensor, plan: Plan, layer: int, name: str) -> None:
        super().__init__(shape, like)
        self.plan, self.layer, self.name = plan, layer, name

    def laid_out(self) -> Tensor:
        """Every row with a copy of all that it shares."""
        return self.plan.gathered(self.name, self.layer)

    def attend(self, values: Lazy, asked: Attention) -> Tensor:
        """Each shared run once for all rows that share it, and then what each has by itself."""
        mask, plan = asked.mask, self.plan
        whole = asked.causal or asked.dropout or (mask is not None and (mask.ndim != 4 or mask.shape[1] > 1))
        if whole or not plan.runs or not isinstance(values, Shared):
            return super().attend(values, asked)
        found: Tensor | None = None
        weight: Tensor | None = None
        query = asked.query
        for run in plan.runs:
            lines = plan.sharing(run, query.device)
            some = query if lines is None else query[lines]
            seen = None if mask is None else mask[..., run.first : run.stop]
            if seen is not None and len(seen) > 1 and lines is not None:
                seen = seen[lines]
            keys, theirs = plan.shared("keys", self.layer, run), plan.shared("values", self.layer, run)
            out, sums = _once(some, keys, theirs, seen, asked.scale)
            if lines is not None:
                out, sums = _among(out, sums, lines, len(query))
            found, weight = (out, sums) if found is None else _merged(found, weight, out, sums)
        keys, theirs = plan.tail("keys", self.layer), plan.tail("values", self.layer)
        out, sums = _apiece(query, keys, theirs, self._rest(mask), asked.scale)
        return _merged(found, weight, out, sums)[0].to(query.dtype)

    def _rest(self, mask: Tensor | None) -> Tensor | None:
        """The mask of what no run reads, from each line's own first slot on [N, 1, T, S]."""
        plan, at = self.plan, self.plan.apart(self.device)
        if at is None:
            return None if mask is None else mask[..., int(plan.tails[0]) :]
        there = (at < plan.stop)[:, None, None]
        if mask is None:
            return there
        wide = mask.expand(len(at), *mask.shape[1:])
        place = at.clamp(max=plan.stop - 1)[:, None, None].expand(*wide.shape[:3], at.shape[1])
        shown = wide.gather(3, place)
        return shown & there if shown.dtype == torch.bool else shown.masked_fill(~there, _UNSEEN)


def _once(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What all rows [G, Hq, T, D] see in keys that they share [1, H, S, D], and the log of its weight."""
    rows, many, width, size = query.shape
    heads = keys.shape[1]
    # All that look at one head of keys become lines of one query: heads of a group, rows, positions.
    lines = (
        query.view(rows, heads, many // heads, width, size).permute(1, 2, 0, 3, 4).reshape(1, heads, -1, size)
    )
    if mask is not None:
        seen = mask.expand(rows, 1, width, mask.shape[-1]).reshape(1, 1, rows * width, -1)
        mask = seen.repeat(1, 1, many // heads, 1)
    out, sums = _weighed(lines, keys, values, mask, scale)
    out = (
        out.view(heads, many // heads, rows, width, -1).permute(2, 0, 1, 3, 4).reshape(rows, many, width, -1)
    )
    sums = sums.view(heads, many // heads, rows, width).permute(2, 0, 1, 3).reshape(rows, many, width)
    return out, sums


def _apiece(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What each row [N, Hq, T, D] sees in its own keys [N, H, S, D], and the log of its weight."""
    rows, many, width, size = query.shape
    heads = keys.shape[1]
    lines = query.reshape(rows, heads, -1, size)
    if mask is not None:
        mask = mask.expand(-1, -1, width, -1).repeat(1, 1, many // heads, 1)
    out, sums = _weighed(lines, keys, values, mask, scale)
    return out.reshape(rows, many, width, -1), sums.reshape(rows, many, width)


def _weighed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [N, H, L, D] and the logarithm of the sum of its weights [N, H, L].

    What a line does not see gets next to no weight rather than none: a line that sees nothing of a part then
    has no weight in it, and the other parts decide.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        plain = torch.zeros_like(mask, dtype=query.dtype)
        mask = plain.masked_fill(~mask, _UNSEEN) if mask.dtype == torch.bool else mask.clamp(min=_UNSEEN)
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        # torch's own kernel, several times faster than the same by hand, and it tells the sum.
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = fused(query, keys, values, attn_mask=mask, scale=scale)
        return out.float(), sums.view(*out.shape[:2], -1)
    scores = (query.float() * scale) @ keys.float().transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp() @ values.float(), sums


def _among(out: Tensor, sums: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same among all rows, those that do not share it seeing nothing."""
    whole = out.new_zeros(count, *out.shape[1:]).index_copy(0, lines, out)
    return whole, sums.new_full((count, *sums.shape[1:]), _UNSEEN).index_copy(0, lines, sums)


def _merged(one: Any, weight: Any, other: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one attention as one, by the weight of each."""
    # The second's share of the weight: no logarithm of a sum has to be taken of both.
    share = torch.sigmoid(sums - weight)
    return torch.lerp(one, other, share[..., None]), torch.logaddexp(weight, sums)


def _picked(held: Tensor, places: Tensor, slots: int) -> Tensor:
    """Slots of a layer [H, S, D], which may not have grown to all `slots` yet where it wrote none of them."""
    if held.shape[1] < slots:
        places = places.clamp(max=held.shape[1] - 1)
    return held.index_select(1, places)


def _parted(arenas: Array, slots: Array, device: torch.device) -> list[tuple[int, Tensor | None, Tensor]]:
    """Places by arena: which of them (None: all), and their slots there."""
    numbers = np.unique(arenas)
    if len(numbers) == 1:
        return [(int(numbers[0]), None, torch.from_numpy(slots).to(device, non_blocking=True))]
    parts: list[tuple[int, Tensor | None, Tensor]] = []
    for number in numbers.tolist():
        lines = np.flatnonzero(arenas == number)
        both = torch.from_numpy(np.stack((lines, slots[lines]))).to(device, non_blocking=True)
        parts.append((number, both[0], both[1]))
    return parts
