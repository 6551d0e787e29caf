"""Attention over paged rows: a shared prefix once for all its rows, then the rest of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.attention.attention_proxy import AttentionCall, KVProxy
from descant.kv_cache.block_pool import BlockPool

T = TypeVar("T")

# The fewest shared slots that are attended separately; below this, a gather is as cheap.
_MIN_SHARED_SLOTS = 64
# Added to the score of a masked key; finite in every precision.
_MASKED_SCORE = -30000.0


class SharedSegment(NamedTuple):
    """A slice of slots that several rows share."""

    rows: Array  # [G] rows of the forward
    start: int  # the first slot
    stop: int


@dataclass
class PagedReadPlan:
    """Where the rows of one forward are in the pool, computed once on the host for all layers."""

    pool: BlockPool
    table: Array  # [N, M] block ids
    read_length: int  # the number of slots to read
    span: KVSpan | None = None
    starts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [N]
    stops: Array | None = None  # [N] the end of each row; slots behind it are not read
    write_slots: tuple[Array, Array] | None = None  # [N * T] slab and slot of every written position
    _memo: dict[Any, Any] = field(default_factory=dict)

    def writes_by_slab(self, device: torch.device) -> Sequence[tuple[int, Tensor | None, Tensor]]:
        """For each slab written: the fed positions (None: all) and their slots."""
        slots = self.write_slots
        assert slots is not None
        return self._once(("writes", device), lambda: _group_by_slab(*slots, device))

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of this key, made once for all layers."""
        if key not in self._memo:
            self._memo[key] = make()
        value: T = self._memo[key]
        return value

    # -------------------------------------------------------------------- reading
    @cached_property
    def shared_segments(self) -> list[SharedSegment]:
        """The shared segments that are long enough to attend separately, in order of position."""
        return list(self._find_shared(np.arange(len(self.table)), 0, 0))

    def _find_shared(self, rows: Array, first: int, at: int) -> Iterator[SharedSegment]:
        """The segments of rows that agree from block `first`, where the last segment ends, to block `at`."""
        size = self.pool.block_size
        # Blocks that a row writes to are its own.
        rows = rows[self.starts[rows] // size > at]
        if len(rows) < 2:
            return
        for block in np.unique(self.table[rows, at]):
            group = rows[self.table[rows, at] == block]
            if len(group) < 2:
                continue
            blocks = self.table[group, at : int(self.starts[group].min()) // size]
            equal = (blocks == blocks[0]).all(0)
            end, begin = at + (blocks.shape[1] if equal.all() else int(equal.argmin())), first
            if (end - first) * size >= _MIN_SHARED_SLOTS:
                yield SharedSegment(group, first * size, end * size)
                begin = end
            yield from self._find_shared(group, begin, end)

    @cached_property
    def tail_starts(self) -> Array:
        """The first slot of each row after its shared segments [N]."""
        tails = np.zeros(len(self.table), dtype=np.int64)
        for segment in self.shared_segments:
            tails[segment.rows] = segment.stop
        return tails

    def segment_rows(self, segment: SharedSegment, device: torch.device) -> Tensor | None:
        """The rows of a segment on a device; None: all rows."""
        if len(segment.rows) == len(self.table):
            return None
        key = ("rows", segment.start, int(segment.rows[0]), device)
        return self._once(key, lambda: torch.from_numpy(segment.rows).to(device, non_blocking=True))

    def tail_slots(self, device: torch.device) -> Tensor | None:
        """The slots of the tails [N, S] on a device; None if all tails start at the same slot."""
        if (self.tail_starts == self.tail_starts[0]).all():
            return None
        return self._once(
            ("tail_slots", device),
            lambda: torch.from_numpy(self._tail_positions()).to(device, non_blocking=True),
        )

    def _tail_positions(self) -> Array:
        """The slots of every row from its tail start on, padded to the longest tail [N, S]."""
        return self.tail_starts[:, None] + np.arange(self.read_length - int(self.tail_starts.min()))

    def gather(self, name: str, layer: int) -> Tensor:
        """All slots of all rows [N, H, S, D]; a view if they are contiguous."""
        slots = self._once("slots", lambda: self._locate_range(0, self.read_length, slice(None)))
        return self._read(name, layer, slots)

    def gather_shared(self, name: str, layer: int, segment: SharedSegment) -> Tensor:
        """The slots of a shared segment [1, H, S, D]."""
        key = ("segment", segment.start, int(segment.rows[0]))
        slots = self._once(key, lambda: self._locate_range(segment.start, segment.stop, segment.rows[:1]))
        return self._read(name, layer, slots)

    def gather_tail(self, name: str, layer: int) -> Tensor:
        """The slots of every row after its shared segments [N, H, S, D]."""
        slots = self._once(
            "tail", lambda: self._locate(*self._own_slots(self._tail_positions(), slice(None)))
        )
        return self._read(name, layer, slots)

    def _locate_range(self, first: int, stop: int, rows: Any) -> _SlotLocations:
        size, slots = self.pool.block_size, np.arange(first, stop)
        if self.stops is not None and int(self.stops[rows].min(initial=stop)) < stop:
            return self._locate(*self._own_slots(slots[None], rows))
        inner = np.broadcast_to(slots % size, (1, len(slots)))
        return self._locate(self.table[rows][:, slots // size], inner)

    def _own_slots(self, slots: Array, rows: Any) -> tuple[Array, Array]:
        """The blocks of slots [N or 1, S] of rows and the slots in them [N, S]; behind a row its first slot.

        Masked values count where they are not finite, so no row may read what is another's.
        """
        size, table = self.pool.block_size, self.table[rows]
        stops = np.full(len(table), table.shape[1] * size) if self.stops is None else self.stops[rows]
        slots = np.where(slots < stops[:, None], slots, 0)
        return np.take_along_axis(table, slots // size, 1), slots % size

    def _locate(self, blocks: Array, inner: Array) -> _SlotLocations:
        """The location of slot `inner` of each block [N, S]; absent blocks read as an arbitrary one."""
        blocks = np.where(blocks < 0, blocks.max(initial=0), blocks)
        slab = self.pool.slab_of[blocks]
        slot = self.pool.index_in_slab[blocks] * self.pool.block_size + inner
        contiguous = None
        if len(blocks) == 1 and (slab == slab[0, 0]).all() and (np.diff(slot[0]) == 1).all():
            contiguous = slice(int(slot[0, 0]), int(slot[0, -1]) + 1)
        return _SlotLocations(slab.shape, int(slab[0, 0]), contiguous, (slab.ravel(), slot.ravel()), {})

    def _read(self, name: str, layer: int, slots: _SlotLocations) -> Tensor:
        """The keys or values at these locations [N, H, S, D]."""
        tensors: dict[int, Tensor] = getattr(self.pool.slabs[slots.slab], name)
        if slots.contiguous is not None:
            return tensors[layer][:, slots.contiguous][None]
        like = tensors[layer] if layer in tensors else self.any_tensor(name, layer)
        if like.device not in slots.by_device:
            slots.by_device[like.device] = _group_by_slab(*slots.locations, like.device)
        groups = slots.by_device[like.device]
        if len(groups) == 1 and layer in tensors:
            out = _gather_slots(like, groups[0][2], self._slab_slots(slots.slab))
        else:
            out = like.new_zeros(like.shape[0], len(slots.locations[0]), like.shape[2])
            for slab_id, index, slab_slots in groups:
                tensor = getattr(self.pool.slabs[slab_id], name).get(layer)
                if tensor is not None:  # zeros where the layer has not written to the slab yet
                    target = slice(None) if index is None else index
                    out[:, target] = _gather_slots(tensor, slab_slots, self._slab_slots(slab_id))
        return out.view(like.shape[0], *slots.shape, like.shape[2]).transpose(0, 1)

    def _slab_slots(self, slab_id: int) -> int:
        return self.pool.slabs[slab_id].num_blocks * self.pool.block_size

    def any_tensor(self, name: str, layer: int) -> Tensor:
        """Some keys or values [H, S, D] of a layer, for their shape."""
        by_slab: list[dict[int, Tensor]] = [getattr(slab, name) for slab in self.pool.slabs.values()]
        return next(tensors[layer] for tensors in by_slab if layer in tensors)


class _SlotLocations(NamedTuple):
    """The slabs and slots of a grid of positions [N, S]."""

    shape: tuple[int, ...]
    slab: int  # the slab of the first position
    contiguous: slice | None  # the slots in that slab, if the grid is one row of consecutive slots
    locations: tuple[Array, Array]  # [N * S] slab and slot of each position
    by_device: dict[torch.device, Any]  # the locations by slab, on a device


class SharedPrefixKV(KVProxy):
    """One layer's keys or values of paged rows, which may share prefixes.

    A shared segment is attended once by the queries of all its rows, and merged with the attention over the
    rest of each row by their log-sum-exp (Juravsky et al. 2024, Hydragen).
    """

    def __init__(
        self, shape: Sequence[int], like: Tensor, plan: PagedReadPlan, layer: int, name: str
    ) -> None:
        super().__init__(shape, like)
        self.plan, self.layer, self.name = plan, layer, name

    def build_tensor(self) -> Tensor:
        """All slots of every row [N, H, S, D], shared ones copied."""
        return self.plan.gather(self.name, self.layer)

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [N, Hq, T, E]: shared segments once, then the tail of each row."""
        mask, plan, query = call.mask, self.plan, call.query
        per_head_mask = mask is not None and (mask.ndim != 4 or mask.shape[1] > 1)
        unsupported = call.is_causal or call.dropout or per_head_mask
        if unsupported or not plan.shared_segments or not isinstance(values, SharedPrefixKV):
            return super().attend(values, call)
        total: Tensor | None = None
        total_lse: Tensor | None = None
        for segment in plan.shared_segments:
            rows = plan.segment_rows(segment, query.device)
            segment_query = query if rows is None else query[rows]
            segment_mask = None if mask is None else mask[..., segment.start : segment.stop]
            if segment_mask is not None and len(segment_mask) > 1 and rows is not None:
                segment_mask = segment_mask[rows]
            shared_keys = plan.gather_shared("keys", self.layer, segment)
            shared_values = plan.gather_shared("values", self.layer, segment)
            out, lse = _shared_attention(segment_query, shared_keys, shared_values, segment_mask, call.scale)
            if rows is not None:
                # Rows outside the segment get no weight.
                out = out.new_zeros(len(query), *out.shape[1:]).index_copy(0, rows, out)
                lse = lse.new_full((len(query), *lse.shape[1:]), _MASKED_SCORE).index_copy(0, rows, lse)
            total, total_lse = (out, lse) if total is None else _merge_by_lse(total, total_lse, out, lse)
        tail_keys, tail_values = plan.gather_tail("keys", self.layer), plan.gather_tail("values", self.layer)
        out, lse = _per_row_attention(query, tail_keys, tail_values, self._tail_mask(mask), call.scale)
        return _merge_by_lse(total, total_lse, out, lse)[0].to(query.dtype)

    def _tail_mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask of the tails, from each row's tail start on [N, 1, T, S]."""
        plan, slots = self.plan, self.plan.tail_slots(self.device)
        if slots is None:
            return None if mask is None else mask[..., int(plan.tail_starts[0]) :]
        exists = (slots < plan.read_length)[:, None, None]
        if mask is None:
            return exists
        mask = mask.expand(len(slots), *mask.shape[1:])
        index = slots.clamp(max=plan.read_length - 1)[:, None, None].expand(*mask.shape[:3], slots.shape[1])
        tail = mask.gather(3, index)
        return tail & exists if tail.dtype == torch.bool else tail.masked_fill(~exists, _MASKED_SCORE)


def paged_proxies(
    plan: PagedReadPlan, layer: int, key: Tensor, value: Tensor
) -> tuple[SharedPrefixKV, SharedPrefixKV]:
    """The keys and values of a plan's rows in a layer; two tensors [..., H, S, D] show their shapes."""
    shape = (len(plan.table), key.shape[-3], plan.read_length)
    return (
        SharedPrefixKV((*shape, key.shape[-1]), key, plan, layer, "keys"),
        SharedPrefixKV((*shape, value.shape[-1]), value, plan, layer, "values"),
    )


def _shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of all rows [G, Hq, T, D] over shared keys [1, H, S, D], and its log-sum-exp [G, Hq, T]."""
    rows, query_heads, width, size = query.shape
    heads, group = keys.shape[1], query_heads // keys.shape[1]
    # Query heads of a group, rows and positions become the query positions of one key head.
    flat = query.view(rows, heads, group, width, size).permute(1, 2, 0, 3, 4).reshape(1, heads, -1, size)
    if mask is not None:
        mask = mask.expand(rows, 1, width, mask.shape[-1]).reshape(1, 1, rows * width, -1)
        mask = mask.repeat(1, 1, group, 1)
    out, lse = _attention_with_lse(flat, keys, values, mask, scale)
    out = out.view(heads, group, rows, width, -1).permute(2, 0, 1, 3, 4).reshape(rows, query_heads, width, -1)
    lse = lse.view(heads, group, rows, width).permute(2, 0, 1, 3).reshape(rows, query_heads, width)
    return out, lse


def _per_row_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of each row [N, Hq, T, D] over its own keys [N, H, S, D], and its log-sum-exp [N, Hq, T]."""
    rows, query_heads, width, size = query.shape
    heads = keys.shape[1]
    grouped = query.reshape(rows, heads, -1, size)
    if mask is not None:
        mask = mask.expand(-1, -1, width, -1).repeat(1, 1, query_heads // heads, 1)
    out, lse = _attention_with_lse(grouped, keys, values, mask, scale)
    return out.reshape(rows, query_heads, width, -1), lse.reshape(rows, query_heads, width)


def _attention_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [N, H, T, D] and the log-sum-exp of its scores [N, H, T], both at least in float32.

    Masked keys get a very low finite score. A query that sees nothing of this part then has a negligible
    weight in the merge, instead of NaN.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, _MASKED_SCORE)
    elif mask is not None:
        mask = mask.clamp(min=_MASKED_SCORE)
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        # The fused kernel returns the log-sum-exp, and is several times faster than explicit products.
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = fused(query, keys, values, attn_mask=mask, scale=scale)
        return out.to(wide), lse.view(*out.shape[:2], -1)
    scores = (query.to(wide) * scale) @ keys.to(wide).transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ values.to(wide), lse


def _merge_by_lse(out: Any, lse: Any, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention over two sets of keys, weighted by log-sum-exp."""
    # A sigmoid of the difference is the other's share of the weight.
    share = torch.sigmoid(other_lse - lse)
    return torch.lerp(out, other_out, share[..., None]), torch.logaddexp(lse, other_lse)


def _gather_slots(tensor: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Slots of a slab's layer [H, S, D]; the tensor has fewer than `num_slots` if it was not grown yet."""
    if tensor.shape[1] < num_slots:
        slots = slots.clamp(max=tensor.shape[1] - 1)
    return tensor.index_select(1, slots)


def _group_by_slab(
    slabs: Array, slots: Array, device: torch.device
) -> list[tuple[int, Tensor | None, Tensor]]:
    """Positions by slab: slab id, the indices of its positions (None: all), and their slots."""
    slab_ids = np.unique(slabs)
    if len(slab_ids) == 1:
        return [(int(slab_ids[0]), None, torch.from_numpy(slots).to(device, non_blocking=True))]
    groups: list[tuple[int, Tensor | None, Tensor]] = []
    for slab_id in slab_ids.tolist():
        index = np.flatnonzero(slabs == slab_id)
        both = torch.from_numpy(np.stack((index, slots[index]))).to(device, non_blocking=True)
        groups.append((slab_id, both[0], both[1]))
    return groups
