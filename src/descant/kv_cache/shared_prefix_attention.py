"""How rows that share blocks are read: what they share once for all of them, then what is each one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.attention_proxy import AttentionCall, KVProxy
from descant.kv_cache.block_pool import BlockPool

__all__ = ["PagedReadPlan", "SharedPrefixKV"]

# What rows share is attended by itself from so many slots on: below, a gather is as cheap.
_MIN_SHARED_SLOTS = 64
# What is added to the score of a key that is not seen, in any precision.
_MASKED_SCORE = -30000.0


class SharedSegment(NamedTuple):
    """Blocks that several rows share, which are read once for all of them."""

    rows: Array  # [G] lines of the forward
    start: int  # its slots
    stop: int


@dataclass
class PagedReadPlan:
    """How the rows of one forward lie in the pool: found once on the host, used by every layer."""

    pool: BlockPool
    table: Array  # [N, M]
    read_length: int  # how many slots are read
    span: KVSpan | None = None
    starts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [N]
    write_slots: tuple[Array, Array] | None = None  # arena and slot of every position that is written [N * T]
    _shared_segments: list[SharedSegment] | None = None
    _memo: dict[Any, Any] = field(default_factory=dict)

    def writes_by_slab(self, device: torch.device) -> Sequence[tuple[int, Tensor | None, Tensor]]:
        """For each arena that is written: which of the fed positions (None: all) go to which slots."""
        if ("writes", device) not in self._memo:
            assert self.write_slots is not None
            self._memo["writes", device] = _group_by_slab(*self.write_slots, device)
        found: Sequence[tuple[int, Tensor | None, Tensor]] = self._memo["writes", device]
        return found

    # -------------------------------------------------------------------- reading
    @property
    def shared_segments(self) -> list[SharedSegment]:
        """What rows share, as far as it is worth a look of its own, what comes first first."""
        if self._shared_segments is None:
            self._shared_segments = []
            self._find_shared(np.arange(len(self.table)), 0, 0)
        return self._shared_segments

    def _find_shared(self, rows: Array, first: int, at: int) -> None:
        """Find what lines share that are alike from block `first`, where no run ends, up to block `at`."""
        size = self.pool.block_size
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
            assert self._shared_segments is not None
            if (end - first) * size >= _MIN_SHARED_SLOTS:
                self._shared_segments.append(SharedSegment(some, first * size, end * size))
                begin = end
            self._find_shared(some, begin, end)

    @cached_property
    def tail_starts(self) -> Array:
        """The first slot of each line that no run reads [N]."""
        tails = np.zeros(len(self.table), dtype=np.int64)
        for run in self.shared_segments:
            tails[run.rows] = run.stop
        return tails

    def segment_rows(self, run: SharedSegment, device: torch.device) -> Tensor | None:
        """The lines that share a run, on a device; None: all of them."""
        if len(run.rows) == len(self.table):
            return None
        key = ("lines", run.start, int(run.rows[0]), device)
        if key not in self._memo:
            self._memo[key] = torch.from_numpy(run.rows).to(device, non_blocking=True)
        lines: Tensor = self._memo[key]
        return lines

    def tail_slots(self, device: torch.device) -> Tensor | None:
        """The slots that tails read [N, S], on a device; None where they all begin alike."""
        if (self.tail_starts == self.tail_starts[0]).all():
            return None
        if ("apart", device) not in self._memo:
            self._memo["apart", device] = torch.from_numpy(self._tail_positions()).to(
                device, non_blocking=True
            )
        slots: Tensor = self._memo["apart", device]
        return slots

    def _tail_positions(self) -> Array:
        """The slots of every line from its tail on, as many as the longest has [N, S]."""
        return self.tail_starts[:, None] + np.arange(self.read_length - int(self.tail_starts.min()))

    def gather(self, name: str, layer: int) -> Tensor:
        """All slots of all lines [N, H, S, D]; a view where they lie in a row."""
        if "slots" not in self._memo:
            self._memo["slots"] = self._locate_range(0, self.read_length, slice(None))
        return self._read(name, layer, self._memo["slots"])

    def gather_shared(self, name: str, layer: int, run: SharedSegment) -> Tensor:
        """The slots of a run [1, H, S, D]."""
        key = ("run", run.start, int(run.rows[0]))
        if key not in self._memo:
            self._memo[key] = self._locate_range(run.start, run.stop, run.rows[:1])
        return self._read(name, layer, self._memo[key])

    def gather_tail(self, name: str, layer: int) -> Tensor:
        """What no run reads of every line, from its own first slot on [N, H, S, D]."""
        if "tail" not in self._memo:
            at, size = self._tail_positions(), self.pool.block_size
            blocks = np.take_along_axis(self.table, np.minimum(at // size, self.table.shape[1] - 1), 1)
            self._memo["tail"] = self._locate(blocks, at % size)
        return self._read(name, layer, self._memo["tail"])

    def _locate_range(self, first: int, stop: int, lines: Any) -> _SlotLocations:
        size = self.pool.block_size
        at = np.arange(first, stop)
        return self._locate(self.table[lines][:, at // size], np.broadcast_to(at % size, (1, len(at))))

    def _locate(self, blocks: Array, inner: Array) -> _SlotLocations:
        """Where these slots of these blocks lie [N, S]; a block that is not there reads as any other."""
        blocks = np.where(blocks < 0, blocks.max(initial=0), blocks)
        arena, slot = (
            self.pool.slab_of[blocks],
            self.pool.index_in_slab[blocks] * self.pool.block_size + inner,
        )
        whole = None
        if len(blocks) == 1 and (arena == arena[0, 0]).all() and (np.diff(slot[0]) == 1).all():
            whole = slice(int(slot[0, 0]), int(slot[0, -1]) + 1)
        return _SlotLocations(arena.shape, int(arena[0, 0]), whole, (arena.ravel(), slot.ravel()), {})

    def _read(self, name: str, layer: int, slots: _SlotLocations) -> Tensor:
        store: dict[int, Tensor] = getattr(self.pool.slabs[slots.slab], name)
        if slots.contiguous is not None:
            return store[layer][:, slots.contiguous][None]
        like = store[layer] if layer in store else self._any_tensor(name, layer)
        if like.device not in slots.by_device:
            slots.by_device[like.device] = _group_by_slab(*slots.locations, like.device)
        parts = slots.by_device[like.device]
        if len(parts) == 1 and layer in store:
            found = _gather_slots(
                like, parts[0][2], self.pool.slabs[slots.slab].num_blocks * self.pool.block_size
            )
        else:
            found = like.new_zeros(like.shape[0], len(slots.locations[0]), like.shape[2])
            for number, lines, places in parts:
                arena = self.pool.slabs[number]
                held = getattr(arena, name).get(layer)
                if held is not None:  # a layer that has not written there yet shows nothing
                    at = slice(None) if lines is None else lines
                    found[:, at] = _gather_slots(held, places, arena.num_blocks * self.pool.block_size)
        return found.view(like.shape[0], *slots.shape, like.shape[2]).transpose(0, 1)

    def _any_tensor(self, name: str, layer: int) -> Tensor:
        """Any tensor of a layer, for its shape."""
        held: list[dict[int, Tensor]] = [getattr(arena, name) for arena in self.pool.slabs.values()]
        return next(store[layer] for store in held if layer in store)


class _SlotLocations(NamedTuple):
    """Where some slots [N, S] lie."""

    shape: tuple[int, ...]
    slab: int  # of the first
    contiguous: slice | None  # in that arena, where they are one line that lies in a row
    locations: tuple[Array, Array]  # arena and slot of each
    by_device: dict[torch.device, Any]


class SharedPrefixKV(KVProxy):
    """One layer's keys or values of the rows of a forward, which may share some.

    A run that several rows share is attended once, by all their queries together, and merged with what each
    has by itself by the logarithm of the sum of weights (Juravsky et al. 2024, Hydragen).
    """

    def __init__(
        self, shape: Sequence[int], like: Tensor, plan: PagedReadPlan, layer: int, name: str
    ) -> None:
        super().__init__(shape, like)
        self.plan, self.layer, self.name = plan, layer, name

    def build_tensor(self) -> Tensor:
        """Every row with a copy of all that it shares."""
        return self.plan.gather(self.name, self.layer)

    def attend(self, values: KVProxy, asked: AttentionCall) -> Tensor:
        """Each shared run once for all rows that share it, and then what each has by itself."""
        mask, plan = asked.mask, self.plan
        whole = (
            asked.is_causal or asked.dropout or (mask is not None and (mask.ndim != 4 or mask.shape[1] > 1))
        )
        if whole or not plan.shared_segments or not isinstance(values, SharedPrefixKV):
            return super().attend(values, asked)
        found: Tensor | None = None
        weight: Tensor | None = None
        query = asked.query
        for run in plan.shared_segments:
            lines = plan.segment_rows(run, query.device)
            some = query if lines is None else query[lines]
            seen = None if mask is None else mask[..., run.start : run.stop]
            if seen is not None and len(seen) > 1 and lines is not None:
                seen = seen[lines]
            keys, theirs = (
                plan.gather_shared("keys", self.layer, run),
                plan.gather_shared("values", self.layer, run),
            )
            out, sums = _shared_attention(some, keys, theirs, seen, asked.scale)
            if lines is not None:
                out, sums = _scatter_rows(out, sums, lines, len(query))
            found, weight = (out, sums) if found is None else _merge_by_lse(found, weight, out, sums)
        keys, theirs = plan.gather_tail("keys", self.layer), plan.gather_tail("values", self.layer)
        out, sums = _per_row_attention(query, keys, theirs, self._tail_mask(mask), asked.scale)
        return _merge_by_lse(found, weight, out, sums)[0].to(query.dtype)

    def _tail_mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask of what no run reads, from each line's own first slot on [N, 1, T, S]."""
        plan, at = self.plan, self.plan.tail_slots(self.device)
        if at is None:
            return None if mask is None else mask[..., int(plan.tail_starts[0]) :]
        there = (at < plan.read_length)[:, None, None]
        if mask is None:
            return there
        wide = mask.expand(len(at), *mask.shape[1:])
        place = at.clamp(max=plan.read_length - 1)[:, None, None].expand(*wide.shape[:3], at.shape[1])
        shown = wide.gather(3, place)
        return shown & there if shown.dtype == torch.bool else shown.masked_fill(~there, _MASKED_SCORE)


def _shared_attention(
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
    out, sums = _attention_with_lse(lines, keys, values, mask, scale)
    out = (
        out.view(heads, many // heads, rows, width, -1).permute(2, 0, 1, 3, 4).reshape(rows, many, width, -1)
    )
    sums = sums.view(heads, many // heads, rows, width).permute(2, 0, 1, 3).reshape(rows, many, width)
    return out, sums


def _per_row_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What each row [N, Hq, T, D] sees in its own keys [N, H, S, D], and the log of its weight."""
    rows, many, width, size = query.shape
    heads = keys.shape[1]
    lines = query.reshape(rows, heads, -1, size)
    if mask is not None:
        mask = mask.expand(-1, -1, width, -1).repeat(1, 1, many // heads, 1)
    out, sums = _attention_with_lse(lines, keys, values, mask, scale)
    return out.reshape(rows, many, width, -1), sums.reshape(rows, many, width)


def _attention_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [N, H, L, D] and the logarithm of the sum of its weights [N, H, L].

    What a line does not see gets next to no weight rather than none: a line that sees nothing of a part then
    has no weight in it, and the other parts decide.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        plain = torch.zeros_like(mask, dtype=query.dtype)
        mask = (
            plain.masked_fill(~mask, _MASKED_SCORE)
            if mask.dtype == torch.bool
            else mask.clamp(min=_MASKED_SCORE)
        )
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


def _scatter_rows(out: Tensor, sums: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same among all rows, those that do not share it seeing nothing."""
    whole = out.new_zeros(count, *out.shape[1:]).index_copy(0, lines, out)
    return whole, sums.new_full((count, *sums.shape[1:]), _MASKED_SCORE).index_copy(0, lines, sums)


def _merge_by_lse(one: Any, weight: Any, other: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one attention as one, by the weight of each."""
    # The second's share of the weight: no logarithm of a sum has to be taken of both.
    share = torch.sigmoid(sums - weight)
    return torch.lerp(one, other, share[..., None]), torch.logaddexp(weight, sums)


def _gather_slots(held: Tensor, places: Tensor, slots: int) -> Tensor:
    """Slots of a layer [H, S, D], which may not have grown to all `slots` yet where it wrote none of them."""
    if held.shape[1] < slots:
        places = places.clamp(max=held.shape[1] - 1)
    return held.index_select(1, places)


def _group_by_slab(
    arenas: Array, slots: Array, device: torch.device
) -> list[tuple[int, Tensor | None, Tensor]]:
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
