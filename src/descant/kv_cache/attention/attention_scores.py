"""Accumulated attention scores of cache slots; which queries count is known only at commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.errors import UnsupportedModel
from descant.kv_cache.attention.attention_proxy import AttentionCall, KVProxy, TensorKVProxy

# Computes the attention of a call over keys and values.
AttendFn = Callable[[tuple[Tensor, Tensor], AttentionCall], Tensor]

# The most attention weights computed at once: 16 MiB in float32.
_MAX_WEIGHTS = 2**22


@dataclass(eq=False)
class WriteRegion:
    """A span in slots, for rows that have evicted some positions; computed once per forward."""

    span: KVSpan
    rows: Tensor  # [N] (host)
    start: Tensor  # [N] (host) the first position written
    past_lengths: Tensor  # [N] (host) the slot of that position
    num_slots: int  # the number of visible slots
    num_committed: Tensor | None = None  # [N] (host) how many of the written positions are not drafts
    is_written: bool = False
    is_marked: bool = False  # whether the block knows which slots it writes
    _index_by_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def index_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [N] and slots [N, T] on a layer's device."""
        if device not in self._index_by_device:
            slots = self.past_lengths[:, None] + torch.arange(self.span.width)
            self._index_by_device[device] = self.rows.to(device), slots.to(device)
        return self._index_by_device[device]


@dataclass(eq=False)
class PendingWrite:
    """One forward's write to a layer since the last commit, and the queries that attended it."""

    region: WriteRegion
    prompt_kv: tuple[Tensor, Tensor] | None = None  # a prompt's keys and values, until they go to a block
    attention_calls: list[AttentionCall] = field(default_factory=list)
    is_attended: bool = False  # whether torch's attention was called
    num_skipped: int = 0  # the number of first queries that are not recorded
    committed_scores: Tensor | None = None  # [N, H, S] scores of the queries that are not drafts
    draft_states: list[Any] = field(default_factory=list)  # the eviction states after 0, 1, 2, ... drafts

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        queries = [call.query for call in self.attention_calls]
        scores = [] if self.committed_scores is None else [self.committed_scores]
        scores += [tensor for state in self.draft_states for tensor in state]
        return sum(tensor.nbytes for tensor in (*(self.prompt_kv or ()), *queries, *scores))

    def record_queries(self, call: AttentionCall, first: int) -> None:
        """Record the queries of a call from index `first` on."""
        self.is_attended, self.num_skipped = True, first
        if first:
            mask = None if call.mask is None else call.mask[:, :, first:]
            call = call._replace(query=call.query[:, :, first:].clone(), mask=mask)
        if call.query.shape[2]:
            self.attention_calls.append(call)


class RecordingKV(TensorKVProxy):
    """Keys or values whose attention is computed by the cache, which records the queries."""

    def __init__(self, tensor: Tensor, attend_fn: AttendFn) -> None:
        super().__init__(tensor)
        self._attend_fn = attend_fn

    def attend(self, values: KVProxy, call: AttentionCall) -> Tensor:
        """The attention output [N, Hq, T, E], computed by the cache."""
        return self._attend_fn((self.materialize(), values.materialize()), call)


def index_of_rows(rows: Tensor, wanted: Tensor) -> Tensor:
    """The index of each wanted row in `rows`, -1 if absent (all host)."""
    size = int(max(rows.max() if len(rows) else 0, wanted.max() if len(wanted) else 0)) + 1
    index = torch.full((size,), -1)
    index[rows] = torch.arange(len(rows))
    return index[wanted]


def valid_ends(writes: list[PendingWrite]) -> list[Tensor]:
    """For each write of a layer the position [N] (host) from which a later write replaced it."""
    ends: list[Tensor] = []
    for write in writes:
        rows, start = write.region.rows, write.region.start
        for earlier, end in zip(writes, ends, strict=False):
            index = index_of_rows(rows, earlier.region.rows)
            rewritten = start[index.clamp(min=0)].masked_fill(index < 0, int(end.max()) if len(end) else 0)
            torch.minimum(end, rewritten, out=end)
        ends.append(start + write.region.span.width)
    return ends


class ScoringQueries(NamedTuple):
    """The queries of one write that count, by row (all host)."""

    write_index: int  # which pending write of the layer
    scored_index: Tensor  # [n] index among the scored rows
    rows: Tensor  # [n] the same as rows of the cache
    write_rows: Tensor | None  # [n] index among the rows of the write; None: all, in order
    start: Tensor  # [n] the first query that counts
    stop: Tensor  # [n] the end of the queries that count


def score_slots(write: PendingWrite, scoring: ScoringQueries, keys: Tensor) -> Tensor:
    """The attention weight that each slot of the keys [n, H, S, D] got from the scoring queries.

    [n, H, S] in float32, summed over the query heads that share a key head.
    """
    if not write.is_attended:
        raise UnsupportedModel(
            "this cache needs a model that calls torch's scaled_dot_product_attention: load it with "
            "attn_implementation='sdpa', or use another cache"
        )
    total = torch.zeros(keys.shape[:3], device=keys.device)
    first, last = scoring.start.clamp(min=write.num_skipped), scoring.stop
    max_queries = int((last - first).max())
    uniform = bool((first == first[0]).all() and (last == last[0]).all())
    for call in write.attention_calls:
        step = max(1, _MAX_WEIGHTS // (len(keys) * call.query.shape[1] * keys.shape[2]))
        for begin in range(0, max_queries, step):
            offsets = torch.arange(begin, min(begin + step, max_queries))
            query_index = (first[:1, None] if uniform else first[:, None]) + offsets  # [n or 1, q]
            at = query_index.clamp(max=write.num_skipped + call.query.shape[2] - 1).to(keys.device)
            selected = select_queries(call, scoring.write_rows, at - write.num_skipped)
            weights = attention_weights(selected, keys, at)
            if not uniform:
                excluded = (query_index >= last[:, None]).to(keys.device)
                weights.masked_fill_(excluded[:, None, None, :, None], 0.0)
            total += weights.sum((2, 3))
    return total


def select_queries(call: AttentionCall, rows: Tensor | None, at: Tensor) -> AttentionCall:
    """The queries at indices [n or 1, q] of some rows of a call; None: of all rows."""

    def take(block: Tensor) -> Tensor:
        if rows is not None:  # a mask may have one row for all
            broadcast = len(block) == 1
            block = block.expand(len(rows), -1, -1, -1) if broadcast else block[rows.to(block.device)]
        if len(at) == 1 and at.shape[1] == block.shape[2]:
            return block
        if len(at) == 1:
            return block.index_select(2, at[0])
        index = at[:, None, :, None].expand(-1, block.shape[1], -1, block.shape[3])
        return block.expand(len(at), -1, -1, -1).gather(2, index)

    return call._replace(query=take(call.query), mask=None if call.mask is None else take(call.mask))


def attention_weights(call: AttentionCall, keys: Tensor, at: Tensor, alive: Tensor | None = None) -> Tensor:
    """The softmax weights [n, H, G, q, S] of queries over keys, G query heads per key head.

    Queries have indices `at` [n or 1, q] in their forward; slots not `alive` [n, H, S] get no weight. The
    weights are at least in float32.
    """
    rows, heads, count, size = call.query.shape
    shape = (rows, keys.shape[1], heads // keys.shape[1], count, keys.shape[2])
    query = call.query.reshape(rows, shape[1], -1, size)
    scale = size**-0.5 if call.scale is None else call.scale
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = (query @ keys.transpose(2, 3)).to(wide).mul_(scale).view(shape)
    slots = torch.arange(keys.shape[2], device=keys.device)
    if call.is_causal:
        weights.masked_fill_(slots > at[:, None, None, :, None], -torch.inf)
    if call.mask is not None:
        mask = call.mask[..., : keys.shape[2]]
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(shape)
        weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
    if alive is not None:
        weights = weights.masked_fill(~alive[:, :, None, None], -torch.inf)
    return weights.softmax(-1)


def select_slots(
    score: Tensor, num_slots: Tensor, num_keep: Tensor, num_protected: int, alive: Tensor | None = None
) -> Tensor:
    """The `num_keep` of its `num_slots` slots that each row and head keeps, in order [N, H, S'].

    The last `num_protected` slots stay, then those with the highest score [N, H, S], ties to the earlier
    slot. Slots not `alive` are dropped.
    """
    size, max_keep = score.shape[2], int(num_keep.max())
    num_slots, num_keep = (count.to(score.device)[:, None, None] for count in (num_slots, num_keep))
    slots = torch.arange(size, device=score.device)
    dropped = slots >= num_slots if alive is None else (slots >= num_slots) | ~alive
    priority = score.masked_fill(slots >= num_slots - num_protected, torch.inf)
    priority = priority.masked_fill(dropped, -torch.inf)
    order = priority.sort(stable=True, dim=-1, descending=True).indices
    selected = order.masked_fill(slots >= num_keep, size).sort(-1).values
    return selected[..., :max_keep].clamp(max=size - 1)
