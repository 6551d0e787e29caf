"""The base of caches that evict slots by attention: slots, scores, and the commit that evicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import ConfigError, InputError
from descant.kv_cache.attention.attention_proxy import AttentionCall, sdpa
from descant.kv_cache.attention.attention_scores import (
    PendingWrite,
    RecordingKV,
    ScoringQueries,
    WriteRegion,
    attention_weights,
    index_of_rows,
    score_slots,
    select_queries,
    select_slots,
    valid_ends,
)
from descant.kv_cache.stores.block_store import (
    BlockStore,
    HeadSize,
    KVPair,
    SlotCopies,
    SlotCopy,
    Workload,
    largest,
    write_slots,
)


class RowOutcomes(NamedTuple):
    """The U distinct outcomes (old row, new length) of a commit, and the outcome of each new row."""

    source_row: Tensor  # [R'] the old row of each new row
    outcome: Tensor  # [R'] the index of its outcome
    parent: Tensor  # [U] the old row
    length: Tensor  # [U] positions
    num_old_slots: Tensor  # [U] slots from before the last forwards that remain
    num_slots: Tensor  # [U] slots including the new ones
    num_keep: Tensor  # [U] slots after eviction
    is_restarted: Tensor  # [U] whether the row was written from position 0


class RowMove(NamedTuple):
    """New rows that have to be copied."""

    source: int  # where they are: -1 in the block, else the index of a pending write
    rows: Tensor  # [N] the new rows
    source_rows: Tensor  # [N] the rows that they are there
    outcomes: Tensor  # [n] their outcomes, each once
    repeat_index: Tensor | None  # [N] the outcome of each row as an index into `outcomes`; None: in order
    scored_index: Tensor | None  # [n] their index among the scored outcomes; None: nothing is evicted


class CommitPlan(NamedTuple):
    """The work of a commit in one layer."""

    scored_rows: Tensor  # [V] the old rows whose slots are scored
    max_slots: int  # the most slots of a scored row
    old_score_mask: Tensor  # [V, 1, S] the slots whose accumulated scores still count
    scoring_queries: list[ScoringQueries]
    moves: list[RowMove]


def plan_commit(
    outcomes: RowOutcomes, writes: list[PendingWrite], score_all: bool, max_queries: int | None
) -> CommitPlan:
    """The plan for layers with these pending writes.

    `score_all`: score every row, not only those that evict. Scores come from the last `max_queries` queries
    of a row; None: from all.
    """
    evicts = outcomes.num_keep < outcomes.num_slots
    scored = torch.arange(len(evicts)) if score_all else evicts.nonzero().squeeze(1)
    parent, length, num_slots = outcomes.parent[scored], outcomes.length[scored], outcomes.num_slots[scored]
    max_slots = int(num_slots.max()) if len(num_slots) else 0
    old_score_mask = (torch.arange(max_slots) < outcomes.num_old_slots[scored][:, None])[:, None]
    scoring_queries = []
    for number, (write, end) in enumerate(zip(writes, valid_ends(writes), strict=True)):
        index = index_of_rows(write.region.rows, parent)
        start = write.region.start[index.clamp(min=0)]
        stop = torch.minimum(length, end[index.clamp(min=0)]) - start
        first = torch.zeros_like(stop) if max_queries is None else (length - max_queries - start).clamp(min=0)
        counted = ((index >= 0) & (first < stop)).nonzero().squeeze(1)
        if len(counted):
            in_order = torch.equal(index[counted], torch.arange(len(write.region.rows)))
            write_rows = None if in_order else index[counted]
            scoring_queries.append(
                ScoringQueries(number, counted, parent[counted], write_rows, first[counted], stop[counted])
            )
    moves = _plan_moves(outcomes, writes, index_of_rows(scored, torch.arange(len(evicts))))
    return CommitPlan(parent, max_slots, old_score_mask, scoring_queries, moves)


def _plan_moves(outcomes: RowOutcomes, writes: list[PendingWrite], scored_index: Tensor) -> list[RowMove]:
    """The rows to copy, grouped by where they are and whether they evict."""
    evicts = outcomes.num_keep < outcomes.num_slots
    reordered = outcomes.source_row != torch.arange(len(outcomes.source_row))
    moved = reordered | (evicts | outcomes.is_restarted)[outcomes.outcome]
    moved &= outcomes.num_keep[outcomes.outcome] > 0
    sources = torch.full_like(outcomes.parent, -1)
    for number, write in enumerate(writes):
        if write.prompt_kv is not None:
            sources[torch.isin(outcomes.parent, write.region.rows)] = number
    groups = torch.stack((sources, evicts.long()), 1)[outcomes.outcome]  # [R', 2]
    moves = []
    for source, evicting in sorted(set(map(tuple, groups[moved].tolist()))):
        rows = (moved & (groups == torch.tensor([source, evicting])).all(1)).nonzero().squeeze(1)
        distinct, index = torch.unique(outcomes.outcome[rows], return_inverse=True)
        repeat_index = None if torch.equal(index, torch.arange(len(distinct))) else index
        source_rows = outcomes.source_row[rows]
        if source >= 0:
            source_rows = index_of_rows(writes[source].region.rows, source_rows)
        scored = scored_index[distinct] if evicting else None
        moves.append(RowMove(source, rows, source_rows, distinct, repeat_index, scored))
    return moves


# Blocks have at least this many free slots after they were grown or shrunk.
_GROWTH_STEP = 64


class EvictingStore(BlockStore):
    """A cache with a limited number of slots per row; each head of each layer keeps the most attended ones.

    The slots of a row are packed in order of position, the same number in every layer and head. Keys keep
    their rotation, queries their true positions. Whether a query is padding or a rejected draft is known
    only at commit, so queries are recorded until then, and only a commit evicts. Query heads that share a
    key head are scored together.
    """

    # `held`: slots of a row; `floor`: the least length it can be cut to; `reading`: its prompt may go on.
    grows = False
    new_row: ClassVar[Mapping[str, int | bool]] = {"held": 0, "floor": 0, "reading": True}
    _num_scoring_queries: int | None = None  # how many of the last queries count; None: all

    def __init__(self, budget: int, num_protected: int) -> None:
        super().__init__()
        self.budget = budget
        self._num_protected = num_protected  # the number of newest slots that are never evicted
        self._accumulates_scores = "score" in self._blocks  # whether scores add up from commit to commit
        self._pending_writes: dict[int, list[PendingWrite]] = {}  # since the last commit
        self._regions: list[WriteRegion] = []
        self.max_rewind: int | None = num_protected

    def _needs_queries(self, region: WriteRegion) -> bool:  # noqa: ARG002 - for subclasses
        """Whether queries of this forward may count."""
        return True

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], call: AttentionCall
    ) -> Tensor:
        """The attention output [N, Hq, T, E] over keys and values; records the queries."""
        raise NotImplementedError

    def _num_to_keep(self, num_slots: Tensor, num_fed: Tensor, reading: Tensor) -> Tensor:
        """The number of slots to keep [U], for rows fed `num_fed` tokens in one forward."""
        raise NotImplementedError

    def _eviction_scores(self, score: Tensor, num_slots: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """The scores that decide, from summed attention [N, H, S] of so many slots [N] (host)."""
        return score

    # -------------------------------------------------------------------- content
    @property
    def slot_counts(self) -> Tensor:
        """The number of slots of each row [R] (host)."""
        return self._columns["held"]

    @property
    def nbytes(self) -> int:
        """The memory of slots, scores and uncommitted writes in bytes."""
        pending = (write.nbytes for writes in self._pending_writes.values() for write in writes)
        return super().nbytes + sum(pending)

    def head_bytes(self, layer: int, head: HeadSize, workload: Workload) -> tuple[int, int]:
        """The final and peak bytes of one head: which slots stay depends on attention, but not how many."""
        byte, score_bytes = torch.zeros(1, 1, 1, 1, dtype=torch.uint8), 4 * self._accumulates_scores

        def resize(num_slots: int, rows: int) -> None:
            self._ensure_capacity(layer, (byte, byte), num_slots, rows)

        def num_kept(num_slots: int, num_fed: int, is_prefill: bool) -> int:
            numbers = (torch.tensor([number]) for number in (num_slots, num_fed, is_prefill))
            return int(self._num_to_keep(*numbers))

        held = num_kept(workload.prompt_length, workload.prompt_length, True)
        resize(held, workload.num_rows)
        self.extend(workload.num_rows)
        for start, stop in workload.strides():
            resize(held + 1, workload.num_fed)
            held = num_kept(held + stop - start, 1, False)
            resize(held, workload.num_fed)
            self._columns["held"] = torch.full((len(self),), held)
            self._shrink_to_fit()
        end = self.nbytes // (2 + score_bytes) * (head.nbytes + score_bytes)
        # Until the first eviction the prompt and its queries are held beside the slots.
        prefill = workload.num_prefilled * workload.prompt_length * (head.nbytes + head.nbytes // 2)
        return end, max(end, prefill)

    def _ensure_capacity(self, layer: int, like: Sequence[Tensor], slots: int, rows: int) -> KVPair:
        if len(like) < len(self._blocks):  # scores are in float32
            like = (*like, torch.zeros(0, like[0].shape[1], 0, device=like[0].device))
        return super()._ensure_capacity(layer, like, slots, rows)

    def _grown_length(self, old: int, slots: int) -> int:
        """The number of slots of a block that must have at least `slots`."""
        return max(slots + _GROWTH_STEP, old + old // 2)

    # -------------------------------------------------------------------- a forward
    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - layers are alike
        """The slots that `update` will return."""
        if torch.equal(self.slot_counts, self.lengths):
            return None
        region = self._region(span)
        return VisibleSlots(region.past_lengths, region.num_slots)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        region = self._region(span)
        write = PendingWrite(region)
        if span.is_first_write:
            # A prompt stays outside the block until the commit decides what is kept of it.
            write.prompt_kv = key, value
        else:
            self._flush_prompts(layer, region.rows)
            key, value = self._write_block(layer, key, value, region)
        if not span.width:
            return key, value
        region.is_written = True
        self._pending_writes.setdefault(layer, []).append(write)
        if not self._needs_queries(region):
            return key, value
        attend_fn = partial(self._on_attention, layer, write)
        return cast(Tensor, RecordingKV(key, attend_fn)), cast(Tensor, RecordingKV(value, attend_fn))

    def _region(self, span: KVSpan) -> WriteRegion:
        """The span in slots, computed once per forward."""
        for region in reversed(self._regions):
            if region.span is span:
                return region
        rows, start = map(torch.from_numpy, span.on_host(len(self)))
        num_evicted = self.lengths - self.slot_counts
        for region in self._regions:
            if region.is_written and region.span.is_first_write:
                num_evicted[region.rows] = 0  # a write from position 0 replaces the row
        past_lengths = start if span.is_first_write else start - num_evicted[rows]
        num_slots = largest(past_lengths) + span.width
        self._regions.append(WriteRegion(span, rows, start, past_lengths, num_slots, span.num_committed))
        return self._regions[-1]

    def _write_block(
        self, layer: int, key: Tensor, value: Tensor, region: WriteRegion
    ) -> tuple[Tensor, Tensor]:
        """Write to the layer's block; returns the slots of the rows there."""
        pair = self._ensure_capacity(layer, (key, value), region.num_slots, len(self))
        if not region.is_marked:
            self._written.mark(region.rows.numpy(), region.past_lengths.numpy() + region.span.width)
            region.is_marked = True
        rows, slots = region.index_on(key.device)
        all_rows = region.span.rows is None
        first = region.num_slots - region.span.width
        if all_rows and bool((region.past_lengths == first).all()):
            for tensor, new in zip(pair, (key, value), strict=True):
                tensor[: len(rows), :, first : region.num_slots] = new
        else:
            write_slots(pair, (key, value), rows, slots)
        fed = slice(len(rows)) if all_rows else rows
        return pair[0][fed, :, : region.num_slots], pair[1][fed, :, : region.num_slots]

    def _flush_prompts(self, layer: int, rows: Tensor) -> None:
        """Write pending prompts to the block if one of their rows is written again before the commit."""
        pending = [write for write in self._pending_writes.get(layer, ()) if write.prompt_kv is not None]
        if any(bool(torch.isin(rows, write.region.rows).any()) for write in pending):
            for write in pending:  # all, in order: a row may have been restarted more than once
                self._write_block(layer, *cast(tuple[Tensor, Tensor], write.prompt_kv), write.region)
                write.prompt_kv = None

    # -------------------------------------------------------------------- a commit
    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit that evicts slots over the budget; nothing changes until it is called."""
        outcomes, columns = self._row_outcomes(parents, lengths)
        row_state = {name: column[outcomes.outcome] for name, column in columns.items()}
        plans: dict[object, CommitPlan] = {}
        copies, scores = SlotCopies(), {}
        # Every layer is scored and everything allocated before the first layer is written.
        for layer in sorted(self._keys.keys() | self._pending_writes.keys()):
            writes = self._pending_writes.get(layer, [])
            signature = tuple((id(write.region), write.prompt_kv is None) for write in writes)
            if signature not in plans:
                plans[signature] = plan_commit(
                    outcomes, writes, self._accumulates_scores, self._num_scoring_queries
                )
            score = self._prepare_layer(layer, outcomes, plans[signature], copies)
            if score is not None:
                scores[layer] = score
        num_keep, most = row_state["held"].numpy(), largest(row_state["held"])
        moved = (outcomes.source_row.numpy() != np.arange(len(num_keep))).nonzero()[0]

        def commit() -> None:
            copies.run()
            for layer, score in scores.items():
                self._blocks["score"][layer][: len(score), :, : score.shape[2]] = score
            # What other rows have left behind the slots of rows that took their place is cleared.
            self._written.mark(np.arange(len(num_keep)), most)
            self._written.clear(self._all_blocks(), moved, num_keep[moved])
            self._set_rows(parents, lengths)
            self._columns = row_state
            self._pending_writes, self._regions = {}, []
            self._shrink_to_fit()

        return commit

    def _shrink_to_fit(self) -> None:
        """Free memory that a long prompt or many rows took and that is no longer needed."""
        count, size = len(self), largest(self.slot_counts) + _GROWTH_STEP
        too_large = [
            layer
            for layer, keys in self._keys.items()
            if len(keys) > 4 * (count + 1) or keys.shape[2] > 2 * size
        ]
        self._shrink_blocks(dict.fromkeys(too_large, (count, size if count else 0)))

    def _row_outcomes(self, parents: Tensor | None, lengths: Tensor) -> tuple[RowOutcomes, dict[str, Tensor]]:
        """The outcomes of a commit, and the row state of each outcome [U]."""
        source_row = torch.arange(len(lengths)) if parents is None else parents
        base = largest(lengths) + 1
        pairs, outcome = torch.unique(source_row * base + lengths, return_inverse=True)
        parent, length = pairs // base, pairs % base
        restarts = [
            region.rows for region in self._regions if region.is_written and region.span.is_first_write
        ]
        restarted = torch.isin(parent, torch.cat([*restarts, parent[:0]]))
        old = {name: column[parent].masked_fill(restarted, 0) for name, column in self._columns.items()}
        old_lengths = self._lengths[parent].masked_fill(restarted, 0)
        short = (length < old["floor"]).nonzero()
        if len(short):
            row, minimum, given = (int(column[short[0]]) for column in (parent, old["floor"], length))
            must = f"must be >= {minimum} for row {row}, which has evicted earlier positions"
            raise InputError("lengths", must, given, "prefill the row again")
        grown = length - old_lengths
        num_slots, reading = old["held"] + grown, old["reading"] | restarted
        num_fed = torch.minimum(grown, self._max_fed()[parent])
        num_keep = self._num_to_keep(num_slots, num_fed, reading)
        columns = {
            "held": num_keep,
            "floor": torch.where(num_keep < num_slots, length - self._num_protected, old["floor"]),
            # Generated text is fed one token at a time, drafts aside.
            "reading": reading & ((old_lengths == 0) | (grown <= 0) | (num_fed > 1)),
        }
        num_old = torch.minimum(old["held"], num_slots)
        outcomes = RowOutcomes(source_row, outcome, parent, length, num_old, num_slots, num_keep, restarted)
        return outcomes, columns

    def _max_fed(self) -> Tensor:
        """The most tokens that a forward since the last commit fed each row [R], drafts excluded."""
        most = torch.zeros(len(self), dtype=torch.long)
        for region in self._regions:
            if region.is_written:
                fed = region.num_committed
                fed = torch.full_like(region.rows, region.span.width) if fed is None else fed
                most[region.rows] = torch.maximum(most[region.rows], fed)
        return most

    def _prepare_layer(
        self, layer: int, outcomes: RowOutcomes, plan: CommitPlan, copies: SlotCopies
    ) -> Tensor | None:
        """Score one layer, grow its block, and add its copies; returns the scores [R', H, S] to store."""
        score, alive = self._layer_scores(layer, plan) if plan.max_slots else (None, None)
        stores_scores = score is not None and self._accumulates_scores
        if not plan.moves and not stores_scores:
            return None
        kept_slots = [self._kept_slots(outcomes, move, score, alive, copies) for move in plan.moves]
        rows, slots = len(outcomes.outcome), largest(outcomes.num_keep)
        self._ensure_capacity(layer, self._layer_kv(layer), slots, rows)
        moves = list(zip(plan.moves, kept_slots, strict=True))
        for side in (0, 1):
            block = self._layer_kv(layer)[side]
            parts = []
            for move, kept in moves:
                source = self._source_kv(layer, move.source)[side]
                width = largest(outcomes.num_slots[move.outcomes]) if kept is None else kept.shape[2]
                target = block.narrow(2, 0, min(width, source.shape[2]))
                found, to = (copies.send(part, block.device) for part in (move.source_rows, move.rows))
                parts.append(SlotCopy(source, found, target, to, kept))
            copies.add(parts)
        if score is None or not stores_scores:
            return None
        return score[copies.send(outcomes.outcome, score.device), :, :slots]

    def _layer_scores(self, layer: int, plan: CommitPlan) -> tuple[Tensor, Tensor | None]:
        """The scores of the scored rows [V, H, S], and the slots alive after draft evictions, if any."""
        keys = self._layer_kv(layer)[0]
        score = torch.zeros(len(plan.scored_rows), keys.shape[1], plan.max_slots, device=keys.device)
        alive: Tensor | None = None
        stored = self._blocks["score"].get(layer) if self._accumulates_scores else None
        if stored is not None and len(stored):
            at = plan.scored_rows.clamp(max=len(stored) - 1).to(keys.device)
            old = stored[at, :, : plan.max_slots]
            counts = plan.old_score_mask[..., : old.shape[2]].to(keys.device)
            score[:, :, : old.shape[2]] = torch.where(counts, old, 0.0)
        for scoring in plan.scoring_queries:
            write = self._pending_writes[layer][scoring.write_index]
            stop, scored = min(plan.max_slots, write.region.num_slots), scoring.scored_index.to(keys.device)
            write_rows = scoring.write_rows
            write_rows = torch.arange(len(scoring.scored_index)) if write_rows is None else write_rows
            at = write_rows.to(keys.device)
            if write.draft_states:
                assert write.region.num_committed is not None
                accepted = (scoring.stop - write.region.num_committed[write_rows]).to(keys.device)
                alive = torch.ones_like(score, dtype=torch.bool) if alive is None else alive
                score[scored, :, :stop], alive[scored, :, :stop] = (
                    torch.stack(states)[accepted, at, :, :stop]
                    for states in zip(*write.draft_states, strict=True)
                )
                continue
            if write.committed_scores is not None and write.region.num_committed is not None:
                score[scored, :, :stop] += write.committed_scores[at, :, :stop]
                first_draft = write.region.num_committed[write_rows]
                scoring = scoring._replace(start=torch.maximum(scoring.start, first_draft))
            source = -1 if write.prompt_kv is None else scoring.write_index
            read_keys, _ = self._read_rows(layer, source, scoring.rows, stop)
            score[scored, :, :stop] += score_slots(write, scoring, read_keys)
        return score, alive

    def _kept_slots(
        self,
        outcomes: RowOutcomes,
        move: RowMove,
        score: Tensor | None,
        alive: Tensor | None,
        copies: SlotCopies,
    ) -> Tensor | None:
        """The slots that rows keep [N, H, K]; None: all. Accumulated scores are packed alike."""
        if move.scored_index is None:
            return None
        assert score is not None
        num_slots, num_keep = outcomes.num_slots[move.outcomes], outcomes.num_keep[move.outcomes]
        at = copies.send(move.scored_index, score.device)
        move_score, move_alive = score[at], None if alive is None else alive[at]
        priority = self._eviction_scores(move_score, num_slots)
        kept_slots = select_slots(priority, num_slots, num_keep, self._num_protected, move_alive)
        if self._accumulates_scores:
            score[at, :, : kept_slots.shape[2]] = move_score.gather(2, kept_slots)
        if move.repeat_index is None:
            return kept_slots
        return kept_slots[copies.send(move.repeat_index, score.device)]

    def _source_kv(self, layer: int, source: int) -> tuple[Tensor, Tensor]:
        """The block (source -1), or the prompt of a pending write."""
        pair = self._pending_writes[layer][source].prompt_kv if source >= 0 else None
        return self._layer_kv(layer) if pair is None else pair

    def _read_rows(self, layer: int, source: int, rows: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """The first slots of rows [N] (host) [N, H, S, D], from the block or from a pending prompt."""
        keys, values = self._source_kv(layer, source)
        if source >= 0:
            rows = index_of_rows(self._pending_writes[layer][source].region.rows, rows)
        if torch.equal(rows, torch.arange(len(rows))):
            return keys[: len(rows), :, :stop], values[: len(rows), :, :stop]
        at = rows.to(keys.device)
        return keys[at, :, :stop], values[at, :, :stop]

    def _layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's block, or a pending prompt if there is no block yet."""
        if layer in self._keys:
            return self._keys[layer], self._values[layer]
        return next(write.prompt_kv for write in self._pending_writes[layer] if write.prompt_kv is not None)


class EvictionState(NamedTuple):
    """The slots of rows after a number of accepted drafts."""

    score: Tensor  # [N, H, S] accumulated attention
    alive: Tensor  # [N, H, S] whether the slot is still there


class SnapKVStore(EvictingStore):
    """SnapKV: evict from the prompt what its last queries do not attend (Li et al. 2024, arXiv 2404.14469).

    At the commit that ends a prompt, the attention of its last `window` queries is summed and average-pooled
    over `kernel` neighbouring slots. Each head keeps the window and the `budget - window` slots with the
    highest sums. Later tokens are never evicted.

    A prompt may be chunked: until a row is fed single tokens, every forward with more than one token for it
    is a prompt chunk. After each chunk the row is cut to the budget, by the last queries of the chunk.
    Drafts accepted together with a prompt count as its end.
    """

    def __init__(self, budget: int, window: int = 32, kernel: int = 7) -> None:
        _check_int("budget", budget, 1)
        _check_int("window", window, 1, budget, "`budget`")
        _check_int("kernel", kernel, 1)
        if kernel % 2 == 0:
            raise ConfigError("kernel", "must be odd", kernel)
        super().__init__(budget, window)
        self._settings = budget, window, kernel
        self.window, self.kernel = window, kernel
        self._num_scoring_queries = window

    def _needs_queries(self, region: WriteRegion) -> bool:
        """During a prompt."""
        return region.span.is_first_write or bool(self._columns["reading"][region.rows].any())

    def _on_attention(
        self,
        layer: int,  # noqa: ARG002 - the interface
        write: PendingWrite,
        pair: tuple[Tensor, Tensor],
        call: AttentionCall,
    ) -> Tensor:
        """The attention output; records the queries that may be among the last `window`."""
        committed = write.region.num_committed
        write.record_queries(call, 0 if committed is None else max(0, int(committed.min()) - self.window))
        return sdpa(*pair, call)

    def _num_to_keep(self, num_slots: Tensor, num_fed: Tensor, reading: Tensor) -> Tensor:
        """The budget during a prompt, everything later."""
        return torch.where(reading & (num_fed > 1), num_slots.clamp(max=self.budget), num_slots)

    def _eviction_scores(self, score: Tensor, num_slots: Tensor) -> Tensor:
        """Scores averaged over neighbouring slots, so that runs of tokens are kept."""
        in_window = torch.arange(score.shape[2]) >= num_slots[:, None, None] - self.window
        score = score.masked_fill(in_window.to(score.device), 0.0)
        return torch.nn.functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)


class H2OStore(EvictingStore):
    """H2O: keep recent slots and those with the most attention (Zhang et al. 2023, arXiv 2306.14048).

    At every commit the attention of the new queries is added to each slot's score. A row with more than
    `budget` slots then keeps, per head, the last `recent` slots and those with the highest scores. Scores
    from queries that are rewound later remain. Drafts give the same result as single tokens: each draft
    sees the slots that would remain if the drafts before it were accepted.
    """

    block_names = ("keys", "values", "score")

    def __init__(self, budget: int, recent: int | None = None) -> None:
        _check_int("budget", budget, 1)
        recent = max(1, budget // 2) if recent is None else recent
        _check_int("recent", recent, 1, budget, "`budget`")
        super().__init__(budget, recent)
        self._settings = budget, recent
        self.recent = recent

    def _on_attention(
        self, layer: int, write: PendingWrite, pair: tuple[Tensor, Tensor], call: AttentionCall
    ) -> Tensor:
        """The attention output; scores the committed queries at once and records the drafts."""
        region, out, repeated = write.region, sdpa(*pair, call), write.is_attended
        if region.num_committed is None:
            write.record_queries(call, 0)
            return out
        all_rows = torch.arange(len(region.rows))
        start = torch.zeros_like(all_rows)
        committed = ScoringQueries(0, all_rows, region.rows, None, start, region.num_committed)
        scores = score_slots(
            PendingWrite(region, attention_calls=[call], is_attended=True), committed, pair[0]
        )
        if write.committed_scores is not None:
            scores = write.committed_scores + scores
        write.committed_scores = scores
        write.record_queries(call, int(region.num_committed.min()))
        if repeated:  # layers that share keys: the first layer's drafts cannot see the second's scores
            write.draft_states = []
        elif self._needs_draft_eviction(region):
            stored, size = self._blocks["score"][layer], pair[0].shape[2]
            old = stored[region.rows.to(stored.device), :, :size]
            is_old = torch.arange(size) < region.past_lengths[:, None, None]
            score = torch.where(is_old.to(old.device), old, 0.0) + write.committed_scores
            out, write.draft_states = self._evict_before_drafts(pair, call, out, score, region)
        return out

    def _evict_before_drafts(
        self,
        pair: tuple[Tensor, Tensor],
        call: AttentionCall,
        out: Tensor,
        score: Tensor,
        region: WriteRegion,
    ) -> tuple[Tensor, list[EvictionState]]:
        """The attention output [N, Hq, T, E] with an eviction before every draft, and the states in between.

        `out` is the output without eviction, `score` [N, H, S] the scores after all queries that are not
        drafts. State `i` is that after `i` accepted drafts.
        """
        keys, values = pair
        device, width = keys.device, region.span.width
        assert region.num_committed is not None
        slots = torch.arange(keys.shape[2], device=device)
        end = (region.past_lengths + region.num_committed).to(device)[:, None, None]
        states = [
            EvictionState(score, self._surviving_slots(score, (slots < end).expand(keys.shape[:3]), end))
        ]
        for draft in range(width - int(region.num_committed.min())):
            query_index = region.num_committed + draft
            at = query_index.clamp(max=width - 1)[:, None].to(device)
            alive = states[-1].alive | (slots == end)
            weights = attention_weights(select_queries(call, None, at), keys, at, alive)  # [N, H, G, 1, S]
            draft_out = (weights.to(values.dtype) @ values[:, :, None]).view(len(out), -1, 1, values.shape[3])
            index = at[:, None, :, None].expand_as(draft_out)
            exists = (query_index < width).to(device)[:, None, None, None]
            out = out.scatter(2, index, torch.where(exists, draft_out, out.gather(2, index)))
            score = score + weights.sum((2, 3)).to(score.dtype)
            end = end + 1
            states.append(EvictionState(score, self._surviving_slots(score, alive, end)))
        return out, states

    def _surviving_slots(self, score: Tensor, alive: Tensor, end: Tensor) -> Tensor:
        """The alive slots [N, H, S] that stay, at most the budget; the newest slot is `end - 1`."""
        slots = torch.arange(score.shape[2], device=score.device)
        priority = score.masked_fill(slots >= end - self.recent, torch.inf)
        order = priority.masked_fill(~alive, -torch.inf).sort(stable=True, dim=-1, descending=True).indices
        num_keep = end.clamp(max=self.budget)
        return torch.zeros_like(alive).scatter(2, order, (slots < num_keep).expand_as(alive))

    def _needs_draft_eviction(self, region: WriteRegion) -> bool:
        """Whether the forward has drafts that would cause evictions."""
        assert region.num_committed is not None
        up_to_date = torch.equal(region.start, self.lengths[region.rows])
        up_to_date = up_to_date and torch.equal(region.past_lengths, self.slot_counts[region.rows])
        over_budget = bool((region.past_lengths + region.span.width > self.budget).any())
        has_drafts = region.span.width > int(region.num_committed.min())
        return not region.span.is_first_write and up_to_date and over_budget and has_drafts

    def _num_to_keep(self, num_slots: Tensor, num_fed: Tensor, reading: Tensor) -> Tensor:  # noqa: ARG002 - the interface
        """At most the budget."""
        return num_slots.clamp(max=self.budget)


def _check_int(
    name: str, value: object, minimum: int, maximum: int | None = None, maximum_name: str = ""
) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(name, f"must be an integer >= {minimum}", value)
    if maximum is not None and value > maximum:
        raise ConfigError(name, f"must be at most {maximum_name}, {maximum}", value)
