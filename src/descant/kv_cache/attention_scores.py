"""Votes: which slots of a cache were looked at, by queries that are known only later to count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.errors import UnsupportedModel
from descant.kv_cache.attention_proxy import AttentionCall, KVProxy

__all__ = [
    "PendingWrite",
    "RecordingKV",
    "ScoringQueries",
    "WriteRegion",
    "attention_weights",
    "index_of_rows",
    "score_slots",
    "select_queries",
    "select_slots",
    "valid_ends",
]

# What answers queries, of keys and values.
AttendFn = Callable[[tuple[Tensor, Tensor], AttentionCall], Tensor]

# At most so many attention weights are computed at once: 16 MiB.
_MAX_WEIGHTS = 2**22


@dataclass(eq=False)
class WriteRegion:
    """A span as rows that have forgotten some positions have it, found once a forward."""

    span: KVSpan
    rows: Tensor  # [N] (host)
    start: Tensor  # [N] (host) the first position written
    past_lengths: Tensor  # [N] (host) the slot that it goes to
    num_slots: int  # how many slots are shown
    num_committed: Tensor | None = None  # [N] (host) how many of the written are no guesses
    is_written: bool = False
    _index_by_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def index_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [N] and slots [N, T] on a layer's device."""
        if device not in self._index_by_device:
            slots = self.past_lengths[:, None] + torch.arange(self.span.width)
            self._index_by_device[device] = self.rows.to(device), slots.to(device)
        return self._index_by_device[device]


@dataclass(eq=False)
class PendingWrite:
    """What one forward wrote to a layer since the last commit, and who looked at it."""

    region: WriteRegion
    prompt_kv: tuple[Tensor, Tensor] | None = (
        None  # keys and values of rows that begin, while no block has them
    )
    attention_calls: list[AttentionCall] = field(default_factory=list)
    is_attended: bool = False  # whether anybody looked
    num_skipped: int = 0  # how many of the first queries are not held
    committed_scores: Tensor | None = None  # [N, H, S] votes of the queries that are no guesses
    draft_states: list[Any] = field(default_factory=list)  # the rounds of those that are

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        queries = [asked.query for asked in self.attention_calls]
        sums = [
            part
            for part in (self.committed_scores, *(part for one in self.draft_states for part in one))
            if part is not None
        ]
        return sum(one.nbytes for one in (*(self.prompt_kv or ()), *queries, *sums))

    def record_queries(self, asked: AttentionCall, quiet: int) -> None:
        """Keep the queries from that place on."""
        self.is_attended, self.num_skipped = True, quiet
        if quiet:
            mask = None if asked.mask is None else asked.mask[:, :, quiet:]
            asked = asked._replace(query=asked.query[:, :, quiet:].clone(), mask=mask)
        if asked.query.shape[2]:
            self.attention_calls.append(asked)


class RecordingKV(KVProxy):
    """Keys or values whose cache hears who looks at them."""

    def __init__(self, block: Tensor, hear: AttendFn) -> None:
        super().__init__(block.shape, block)
        self._block, self._attend_fn = block, hear

    def build_tensor(self) -> Tensor:
        """The block as it is."""
        return self._block

    def attend(self, values: KVProxy, asked: AttentionCall) -> Tensor:
        """What the cache says."""
        return self._attend_fn((self.materialize(), values.materialize()), asked)


def index_of_rows(rows: Tensor, wanted: Tensor) -> Tensor:
    """Where each wanted row is among `rows`, -1 where it is not (all host)."""
    size = int(max(rows.max() if len(rows) else 0, wanted.max() if len(wanted) else 0)) + 1
    place = torch.full((size,), -1)
    place[rows] = torch.arange(len(rows))
    return place[wanted]


def valid_ends(writes: list[PendingWrite]) -> list[Tensor]:
    """Of each write of a layer, up to which position [N] (host) a row's was not written again later."""
    ends: list[Tensor] = []
    for write in writes:
        rows, start = write.region.rows, write.region.start
        for earlier, end in zip(writes, ends, strict=False):
            line = index_of_rows(rows, earlier.region.rows)
            again = start[line.clamp(min=0)].masked_fill(line < 0, int(end.max()) if len(end) else 0)
            torch.minimum(end, again, out=end)
        ends.append(start + write.region.span.width)
    return ends


class ScoringQueries(NamedTuple):
    """Which queries of a write vote, for which rows (all host)."""

    write_index: int  # the number of the write
    scored_index: Tensor  # [n] which of the rows that are voted on
    rows: Tensor  # [n] the same as rows of the table
    write_rows: Tensor | None  # [n] their lines in the write; None: all, in order
    start: Tensor  # [n] the first query that votes
    stop: Tensor  # [n] the one after the last


def score_slots(write: PendingWrite, ballot: ScoringQueries, keys: Tensor) -> Tensor:
    """The attention that the queries of a ballot gave each slot of the keys [n, H, S, D] that they saw.

    [n, H, S] in float32, summed over the query heads that share a head of keys.
    """
    if not write.is_attended:
        must = "a model has to look at its keys with torch's scaled_dot_product_attention for this cache"
        raise UnsupportedModel(f"{must}: load it with attn_implementation='sdpa', or take another cache")
    total = torch.zeros(keys.shape[:3], device=keys.device)
    first, last = ballot.start.clamp(min=write.num_skipped), ballot.stop
    most = int((last - first).max())
    even = bool((first == first[0]).all() and (last == last[0]).all())
    for asked in write.attention_calls:
        step = max(1, _MAX_WEIGHTS // (len(keys) * asked.query.shape[1] * keys.shape[2]))
        for begin in range(0, most, step):
            place = torch.arange(begin, min(begin + step, most))
            place = (first[:1, None] if even else first[:, None]) + place
            at = place.clamp(max=write.num_skipped + asked.query.shape[2] - 1).to(keys.device)  # [n or 1, q]
            seen = attention_weights(
                select_queries(asked, ballot.write_rows, at - write.num_skipped), keys, at
            )
            if not even:
                silent = (place >= last[:, None]).to(keys.device)
                seen.masked_fill_(silent[:, None, None, :, None], 0.0)
            total += seen.sum((2, 3))
    return total


def select_queries(asked: AttentionCall, line: Tensor | None, at: Tensor) -> AttentionCall:
    """The questions at places [n or 1, q] of some lines."""

    def take(block: Tensor) -> Tensor:
        if line is not None:  # one line may stand for all
            one = len(block) == 1
            block = block.expand(len(line), -1, -1, -1) if one else block[line.to(block.device)]
        if len(at) == 1 and at.shape[1] == block.shape[2]:
            return block
        if len(at) == 1:
            return block.index_select(2, at[0])
        index = at[:, None, :, None].expand(-1, block.shape[1], -1, block.shape[3])
        return block.expand(len(at), -1, -1, -1).gather(2, index)

    return asked._replace(query=take(asked.query), mask=None if asked.mask is None else take(asked.mask))


def attention_weights(asked: AttentionCall, keys: Tensor, at: Tensor, seen: Tensor | None = None) -> Tensor:
    """How much each query looks at each slot [n, H, G, q, S], G query heads to a head of keys.

    Queries are at places [n or 1, q] of their forward; `seen` [n, H, S] are slots that are still there.
    """
    rows, heads, count, size = asked.query.shape
    shape = (rows, keys.shape[1], heads // keys.shape[1], count, keys.shape[2])
    query = asked.query.reshape(rows, shape[1], -1, size)
    scale = size**-0.5 if asked.scale is None else asked.scale
    weights = (query @ keys.transpose(2, 3)).float().mul_(scale).view(shape)
    slots = torch.arange(keys.shape[2], device=keys.device)
    if asked.is_causal:
        weights.masked_fill_(slots > at[:, None, None, :, None], -torch.inf)
    if asked.mask is not None:
        mask = asked.mask[..., : keys.shape[2]]
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(shape)
        weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
    if seen is not None:
        weights = weights.masked_fill(~seen[:, :, None, None], -torch.inf)
    return weights.softmax(-1)


def select_slots(
    score: Tensor, held: Tensor, keep: Tensor, spared: int, seen: Tensor | None = None
) -> Tensor:
    """Which of its `held` slots each row and head keeps, `keep` of them, in order [N, H, S'].

    The last `spared` stay, and of the others those with the highest score [N, H, S], the earlier of equals;
    none that is no longer `seen`.
    """
    size, most = score.shape[2], int(keep.max())
    held, keep = (count.to(score.device)[:, None, None] for count in (held, keep))
    slots = torch.arange(size, device=score.device)
    gone = slots >= held if seen is None else (slots >= held) | ~seen
    weight = score.masked_fill(slots >= held - spared, torch.inf).masked_fill(gone, -torch.inf)
    order = weight.sort(stable=True, dim=-1, descending=True).indices
    kept = order.masked_fill(slots >= keep, size).sort(-1).values
    return kept[..., :most].clamp(max=size - 1)
