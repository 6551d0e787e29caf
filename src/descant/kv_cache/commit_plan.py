"""The host-side plan of a commit that evicts slots, computed once for all layers (all tensors host)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.attention_scores import PendingWrite, ScoringQueries, index_of_rows, valid_ends

__all__ = ["CommitPlan", "RowMove", "RowOutcomes", "plan_commit"]


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
    outcomes: Tensor  # [n] their outcomes, each once
    repeat_index: Tensor | None  # [N] the outcome of each row as an index into `outcomes`; None: in order
    scored_index: Tensor | None  # [n] their index among the scored outcomes; None: nothing is evicted


class CommitPlan(NamedTuple):
    """What a commit does in one layer."""

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
        moves.append(
            RowMove(source, rows, distinct, repeat_index, scored_index[distinct] if evicting else None)
        )
    return moves
