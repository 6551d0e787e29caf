"""Fates: what a commit makes of rows that forget, found once for all layers (all of it on the host)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.attention_scores import PendingWrite, ScoringQueries, index_of_rows, valid_ends

__all__ = ["CommitPlan", "RowMove", "RowOutcomes", "plan_commit"]


class RowOutcomes(NamedTuple):
    """Each new row is one of U old rows, cut to some length."""

    source_row: Tensor  # [R'] its old row
    outcome: Tensor  # [R'] its cut row
    parent: Tensor  # [U] the old row
    length: Tensor  # [U] positions
    num_old_slots: Tensor  # [U] slots that it had and still has
    num_slots: Tensor  # [U] slots with those that were written
    num_keep: Tensor  # [U] slots that stay
    is_restarted: Tensor  # [U] whether it was read from its first position on


class RowMove(NamedTuple):
    """Rows whose slots are laid elsewhere."""

    source: int  # where they lie: -1 in the block, else in the write of that number
    rows: Tensor  # [N] the new rows
    outcomes: Tensor  # [n] the cut rows that they are, each once
    repeat_index: Tensor | None  # [N] which of those each is; None: in order
    scored_index: Tensor | None  # [n] which of those that are voted on they are; None: they lose nothing


class CommitPlan(NamedTuple):
    """What a commit has to do in a layer."""

    scored_rows: Tensor  # [V] the old rows that are voted on
    max_slots: int  # the most slots that one of them holds
    old_score_mask: Tensor  # [V, 1, S] the slots whose old votes count
    scoring_queries: list[ScoringQueries]
    moves: list[RowMove]


def plan_commit(
    fate: RowOutcomes, writes: list[PendingWrite], everybody: bool, last: int | None
) -> CommitPlan:
    """What is to do in layers that were written like that.

    `everybody`: all rows are voted on, not only those that lose something; by the `last` queries, or by all.
    """
    lost = fate.num_keep < fate.num_slots
    voted = torch.arange(len(lost)) if everybody else lost.nonzero().squeeze(1)
    parent, length, held = fate.parent[voted], fate.length[voted], fate.num_slots[voted]
    wide = int(held.max()) if len(held) else 0
    stays = (torch.arange(wide) < fate.num_old_slots[voted][:, None])[:, None]
    ballots = []
    for number, (write, end) in enumerate(zip(writes, valid_ends(writes), strict=True)):
        line = index_of_rows(write.region.rows, parent)
        start = write.region.start[line.clamp(min=0)]
        stop = torch.minimum(length, end[line.clamp(min=0)]) - start
        first = torch.zeros_like(stop) if last is None else (length - last - start).clamp(min=0)
        mine = ((line >= 0) & (first < stop)).nonzero().squeeze(1)
        if len(mine):
            whole = torch.equal(line[mine], torch.arange(len(write.region.rows)))
            lines = None if whole else line[mine]
            ballots.append(ScoringQueries(number, mine, parent[mine], lines, first[mine], stop[mine]))
    return CommitPlan(
        parent, wide, stays, ballots, _plan_moves(fate, writes, index_of_rows(voted, torch.arange(len(lost))))
    )


def _plan_moves(fate: RowOutcomes, writes: list[PendingWrite], voted: Tensor) -> list[RowMove]:
    """Which rows are laid elsewhere, by where they lie and whether they lose something."""
    lost = fate.num_keep < fate.num_slots
    moved = (fate.source_row != torch.arange(len(fate.source_row))) | (lost | fate.is_restarted)[fate.outcome]
    moved &= fate.num_keep[fate.outcome] > 0
    lies = torch.full_like(fate.parent, -1)
    for number, write in enumerate(writes):
        if write.prompt_kv is not None:
            lies[torch.isin(fate.parent, write.region.rows)] = number
    kinds = torch.stack((lies, lost.long()), 1)[fate.outcome]  # [R', 2]
    moves = []
    for source, loses in sorted(set(map(tuple, kinds[moved].tolist()))):
        rows = (moved & (kinds == torch.tensor([source, loses])).all(1)).nonzero().squeeze(1)
        which, line = torch.unique(fate.outcome[rows], return_inverse=True)
        again = None if torch.equal(line, torch.arange(len(which))) else line
        moves.append(RowMove(source, rows, which, again, voted[which] if loses else None))
    return moves
