"""The base of caches that evict slots by attention: slots, scores, and the commit that evicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.attention_proxy import AttentionCall
from descant.kv_cache.attention_scores import (
    PendingWrite,
    RecordingKV,
    WriteRegion,
    index_of_rows,
    score_slots,
    select_slots,
)
from descant.kv_cache.commit_plan import CommitPlan, RowMove, RowOutcomes, plan_commit
from descant.kv_cache.row_copies import CopyBuffers
from descant.kv_cache.slot_blocks import SlotBlocks
from descant.kv_cache.slot_moves import SlotMove, move_slots, reserve_moves
from descant.kv_cache.written_slots import WrittenSlots

__all__ = ["EvictingStore"]


class EvictingStore:
    """A cache with a limited number of slots per row; each head of each layer keeps the most attended ones.

    The slots of a row are packed in order of position, the same number in every layer and head. Keys keep
    their rotation, queries their true positions. Whether a query is padding or a rejected draft is known
    only at commit, so queries are recorded until then, and only a commit evicts. Query heads that share a
    key head are scored together.
    """

    lossless = True
    capacity: int | None = None
    _accumulates_scores = False  # whether scores add up from commit to commit
    _num_scoring_queries: int | None = None  # how many of the last queries count; None: all

    def __init__(self, budget: int, num_protected: int) -> None:
        self.budget = budget
        self._num_protected = num_protected  # the number of newest slots that are never evicted
        self._slots = SlotBlocks(self._accumulates_scores)
        self._pending_writes: dict[int, list[PendingWrite]] = {}  # since the last commit
        self._regions: list[WriteRegion] = []
        # `held`: slots of a row; `floor`: the least length it can be cut to; `reading`: its prompt may go on.
        self._row_state = {name: torch.zeros(0, dtype=torch.long) for name in ("lengths", "held", "floor")}
        self._row_state["reading"] = torch.zeros(0, dtype=torch.bool)
        self._written = WrittenSlots()

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

    def _make_empty(self) -> Self:
        """An empty store with the same settings."""
        raise NotImplementedError

    # -------------------------------------------------------------------- content
    @property
    def max_rewind(self) -> int | None:
        """The protected slots: a row can be cut by that many positions."""
        return self._num_protected

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), evicted ones included."""
        return self._row_state["lengths"]

    @property
    def slot_counts(self) -> Tensor:
        """The number of slots of each row [R] (host)."""
        return self._row_state["held"]

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._slots.blocks)

    @property
    def nbytes(self) -> int:
        """The memory of slots, scores and uncommitted writes in bytes."""
        pending = sum(write.nbytes for writes in self._pending_writes.values() for write in writes)
        return pending + self._slots.nbytes

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed slots of rows [N] (host) in a layer, packed [N, H, S, D]."""
        block = self._slots.select_rows(rows, _max_or_zero(self.slot_counts[rows]), [layer]).blocks[layer]
        return block.keys, block.values

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._clear_rows(np.arange(len(self), len(self) + rows))
        self._row_state = {
            name: torch.cat((column, column.new_full((rows,), name == "reading")))
            for name, column in self._row_state.items()
        }

    def _clear_rows(self, rows: Array) -> None:
        """Zero all that earlier rows have left in the place of these rows [N]."""
        self._written.clear(self._slots.tensors(), rows, np.zeros_like(rows))

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
        num_slots = _max_or_zero(past_lengths) + span.width
        self._regions.append(WriteRegion(span, rows, start, past_lengths, num_slots, span.num_committed))
        return self._regions[-1]

    def _write_block(
        self, layer: int, key: Tensor, value: Tensor, region: WriteRegion
    ) -> tuple[Tensor, Tensor]:
        """Write to the layer's block; returns the slots of the rows there."""
        block = self._slots.ensure_capacity(layer, (key, value), len(self), region.num_slots)
        if not region.is_marked:
            self._written.mark(region.rows.numpy(), region.past_lengths.numpy() + region.span.width)
            region.is_marked = True
        rows, at = region.index_on(key.device)
        all_rows = region.span.rows is None
        first = region.num_slots - region.span.width
        uniform = all_rows and bool((region.past_lengths == first).all())
        visible = []
        for tensor, new in ((block.keys, key), (block.values, value)):
            if uniform:
                tensor[: len(rows), :, first : region.num_slots] = new
            else:
                tensor[rows[:, None], :, at] = new.transpose(1, 2)
            fed = slice(len(rows)) if all_rows else rows
            visible.append(tensor[fed, :, : region.num_slots])
        return visible[0], visible[1]

    def _flush_prompts(self, layer: int, rows: Tensor) -> None:
        """Write pending prompts to the block if one of their rows is written again before the commit."""
        pending = [write for write in self._pending_writes.get(layer, ()) if write.prompt_kv is not None]
        if any(bool(torch.isin(rows, write.region.rows).any()) for write in pending):
            for write in pending:  # all, in order: a row may have been restarted more than once
                self._write_block(layer, *cast(tuple[Tensor, Tensor], write.prompt_kv), write.region)
                write.prompt_kv = None

    # -------------------------------------------------------------------- a commit
    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, with slots over the budget evicted."""
        outcomes, columns = self._row_outcomes(parents, lengths)
        row_state = {name: column[outcomes.outcome] for name, column in columns.items()}
        plans: dict[object, CommitPlan] = {}
        changes: list[tuple[int, list[SlotMove], Tensor | None]] = []
        buffers = CopyBuffers()
        # Every layer is scored and everything allocated before the first layer is written.
        for layer in sorted(self._slots.blocks.keys() | self._pending_writes.keys()):
            writes = self._pending_writes.get(layer, [])
            signature = tuple((id(write.region), write.prompt_kv is None) for write in writes)
            if signature not in plans:
                plans[signature] = plan_commit(
                    outcomes, writes, self._accumulates_scores, self._num_scoring_queries
                )
            moves, score = self._prepare_layer(layer, outcomes, plans[signature])
            if moves or score is not None:
                reserve_moves(buffers, moves)
                changes.append((layer, moves, score))
        for layer, moves, score in changes:
            block = self._slots.blocks[layer]
            move_slots(buffers, moves, block)
            if score is not None:
                block.score[: len(score), :, : score.shape[2]] = score
        self._clear_moved(outcomes)
        self._row_state = row_state
        self._pending_writes, self._regions = {}, []
        self._slots.shrink_to_fit(len(self), _max_or_zero(self.slot_counts))

    def _clear_moved(self, outcomes: RowOutcomes) -> None:
        """Zero what other rows have left behind the slots of rows that took their place."""
        num_keep = outcomes.num_keep[outcomes.outcome].numpy()
        rows = np.arange(len(num_keep))
        self._written.mark(rows, _max_or_zero(outcomes.num_keep))
        moved = rows[outcomes.source_row.numpy() != rows]
        self._written.clear(self._slots.tensors(), moved, num_keep[moved])

    def _row_outcomes(self, parents: Tensor | None, lengths: Tensor) -> tuple[RowOutcomes, dict[str, Tensor]]:
        """The outcomes of a commit, and the row state of each outcome [U]."""
        source_row = torch.arange(len(lengths)) if parents is None else parents
        base = _max_or_zero(lengths) + 1
        pairs, outcome = torch.unique(source_row * base + lengths, return_inverse=True)
        parent, length = pairs // base, pairs % base
        restarts = [
            region.rows for region in self._regions if region.is_written and region.span.is_first_write
        ]
        restarted = torch.isin(parent, torch.cat([*restarts, parent[:0]]))
        old = {name: column[parent].masked_fill(restarted, 0) for name, column in self._row_state.items()}
        self._check_floor(parent, length, old["floor"])
        grown = length - old["lengths"]
        num_slots, reading = old["held"] + grown, old["reading"] | restarted
        num_fed = torch.minimum(grown, self._max_fed()[parent])
        num_keep = self._num_to_keep(num_slots, num_fed, reading)
        columns = {
            "lengths": length,
            "held": num_keep,
            "floor": torch.where(num_keep < num_slots, length - self._num_protected, old["floor"]),
            # Generated text is fed one token at a time, drafts aside.
            "reading": reading & ((old["lengths"] == 0) | (grown <= 0) | (num_fed > 1)),
        }
        num_old = torch.minimum(old["held"], num_slots)
        outcomes = RowOutcomes(source_row, outcome, parent, length, num_old, num_slots, num_keep, restarted)
        return outcomes, columns

    def _check_floor(self, parent: Tensor, length: Tensor, floor: Tensor) -> None:
        """Refuse lengths whose positions were partly evicted."""
        short = (length < floor).nonzero()
        if len(short):
            row, minimum, given = (int(column[short[0]]) for column in (parent, floor, length))
            must = f"must be >= {minimum} for row {row}, which has evicted earlier positions"
            raise InputError("lengths", must, given, "prefill the row again")

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
        self, layer: int, outcomes: RowOutcomes, plan: CommitPlan
    ) -> tuple[list[SlotMove], Tensor | None]:
        """Score one layer and grow its block; the moves to make, and the scores [R', H, S] to store."""
        score, alive = self._layer_scores(layer, plan) if plan.max_slots else (None, None)
        stores_scores = score is not None and self._accumulates_scores
        if not plan.moves and not stores_scores:
            return [], None
        kept_slots = [self._kept_slots(outcomes, move, score, alive) for move in plan.moves]
        rows, slots = len(outcomes.outcome), _max_or_zero(outcomes.num_keep)
        self._slots.ensure_capacity(layer, self._layer_kv(layer), rows, slots)
        moves = [
            self._slot_move(layer, outcomes, move, kept)
            for move, kept in zip(plan.moves, kept_slots, strict=True)
        ]
        if score is None or not stores_scores:
            return moves, None
        return moves, score[outcomes.outcome.to(score.device), :, :slots]

    def _layer_scores(self, layer: int, plan: CommitPlan) -> tuple[Tensor, Tensor | None]:
        """The scores of the scored rows [V, H, S], and the slots alive after draft evictions, if any."""
        keys = self._layer_kv(layer)[0]
        score = torch.zeros(len(plan.scored_rows), keys.shape[1], plan.max_slots, device=keys.device)
        alive: Tensor | None = None
        block = self._slots.blocks.get(layer)
        if block is not None and self._accumulates_scores and len(block.score):
            at = plan.scored_rows.clamp(max=len(block.score) - 1).to(keys.device)
            old = block.score[at, :, : plan.max_slots]
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
        self, outcomes: RowOutcomes, move: RowMove, score: Tensor | None, alive: Tensor | None
    ) -> Tensor | None:
        """The slots that rows keep [n, H, K]; None: all. Accumulated scores are packed alike."""
        if move.scored_index is None:
            return None
        assert score is not None
        num_slots, num_keep = outcomes.num_slots[move.outcomes], outcomes.num_keep[move.outcomes]
        at = move.scored_index.to(score.device)
        move_score, move_alive = score[at], None if alive is None else alive[at]
        priority = self._eviction_scores(move_score, num_slots)
        kept_slots = select_slots(priority, num_slots, num_keep, self._num_protected, move_alive)
        if self._accumulates_scores:
            score[at, :, : kept_slots.shape[2]] = move_score.gather(2, kept_slots)
        return kept_slots

    def _slot_move(self, layer: int, outcomes: RowOutcomes, move: RowMove, kept: Tensor | None) -> SlotMove:
        """The copy of the kept slots of a move's rows."""
        source, index = self._locate_rows(layer, move.source, outcomes.parent[move.outcomes])
        device = source[0].device
        if move.repeat_index is not None:
            index = index[move.repeat_index]
            kept = None if kept is None else kept[move.repeat_index.to(kept.device)]
        slots = _max_or_zero(outcomes.num_slots[move.outcomes]) if kept is None else kept
        heads = torch.arange(source[0].shape[1], device=device)[:, None]
        return SlotMove(source, index.to(device), slots, heads, move.rows.to(device))

    def _locate_rows(self, layer: int, source: int, rows: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The tensors with rows [N] (host), the block or a pending prompt, and their index there."""
        pair = self._pending_writes[layer][source].prompt_kv if source >= 0 else None
        if pair is None:
            return self._layer_kv(layer), rows
        return pair, index_of_rows(self._pending_writes[layer][source].region.rows, rows)

    def _read_rows(self, layer: int, source: int, rows: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """The first slots of rows [N] (host) [N, H, S, D], from the block or from a pending prompt."""
        (keys, values), index = self._locate_rows(layer, source, rows)
        if torch.equal(index, torch.arange(len(index))):
            return keys[: len(index), :, :stop], values[: len(index), :, :stop]
        at = index.to(keys.device)
        return keys[at, :, :stop], values[at, :, :stop]

    def _layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's block, or a pending prompt if there is no block yet."""
        block = self._slots.blocks.get(layer)
        if block is not None:
            return block.keys, block.values
        return next(write.prompt_kv for write in self._pending_writes[layer] if write.prompt_kv is not None)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        other = self._make_empty()
        other._row_state = {name: column[rows] for name, column in self._row_state.items()}
        num_slots = _max_or_zero(other.slot_counts)
        other._slots = self._slots.select_rows(rows, num_slots)
        other._written.mark(np.arange(len(rows)), num_slots)
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        num_slots, added = _max_or_zero(other.slot_counts), np.arange(len(self), len(self) + len(other))
        self._clear_rows(added)
        self._slots.append(other._slots, len(self), len(other), num_slots)
        self._written.mark(added, num_slots)
        self._row_state = {
            name: torch.cat((column, other._row_state[name])) for name, column in self._row_state.items()
        }

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        self._slots.to(device)

    def state(self) -> dict[str, Tensor]:
        """All committed rows: row state, and by layer the slots."""
        columns = {name: column.clone() for name, column in self._row_state.items()}
        return columns | self._slots.state(len(self), _max_or_zero(self.slot_counts))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store."""
        for name, column in self._row_state.items():
            self._row_state[name] = state[name].cpu().to(column.dtype)
        self._slots.load(state)
        self._written.mark(np.arange(len(self)), _max_or_zero(self.slot_counts))


def _max_or_zero(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0
