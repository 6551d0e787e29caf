"""Fates: what a commit makes of rows that forget, found once for all layers (all of it on the host)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.attention_scores import Ballot, Write, lines_of, live

__all__ = ["Fate", "Move", "Plan", "planned"]


class Fate(NamedTuple):
    """Each new row is one of U old rows, cut to some length."""

    whence: Tensor  # [R'] its old row
    which: Tensor  # [R'] its cut row
    parent: Tensor  # [U] the old row
    length: Tensor  # [U] positions
    before: Tensor  # [U] slots that it had and still has
    held: Tensor  # [U] slots with those that were written
    keep: Tensor  # [U] slots that stay
    begun: Tensor  # [U] whether it was read from its first position on


class Move(NamedTuple):
    """Rows whose slots are laid elsewhere."""

    source: int  # where they lie: -1 in the block, else in the write of that number
    rows: Tensor  # [N] the new rows
    which: Tensor  # [n] the cut rows that they are, each once
    line: Tensor | None  # [N] which of those each is; None: in order
    voted: Tensor | None  # [n] which of those that are voted on they are; None: they lose nothing


class Plan(NamedTuple):
    """What a commit has to do in a layer."""

    parent: Tensor  # [V] the old rows that are voted on
    wide: int  # the most slots that one of them holds
    stays: Tensor  # [V, 1, S] the slots whose old votes count
    ballots: list[Ballot]
    moves: list[Move]


def planned(fate: Fate, writes: list[Write], everybody: bool, last: int | None) -> Plan:
    """What is to do in layers that were written like that.

    `everybody`: all rows are voted on, not only those that lose something; by the `last` queries, or by all.
    """
    lost = fate.keep < fate.held
    voted = torch.arange(len(lost)) if everybody else lost.nonzero().squeeze(1)
    parent, length, held = fate.parent[voted], fate.length[voted], fate.held[voted]
    wide = int(held.max()) if len(held) else 0
    stays = (torch.arange(wide) < fate.before[voted][:, None])[:, None]
    ballots = []
    for number, (write, end) in enumerate(zip(writes, live(writes), strict=True)):
        line = lines_of(write.where.rows, parent)
        start = write.where.start[line.clamp(min=0)]
        stop = torch.minimum(length, end[line.clamp(min=0)]) - start
        first = torch.zeros_like(stop) if last is None else (length - last - start).clamp(min=0)
        mine = ((line >= 0) & (first < stop)).nonzero().squeeze(1)
        if len(mine):
            whole = torch.equal(line[mine], torch.arange(len(write.where.rows)))
            lines = None if whole else line[mine]
            ballots.append(Ballot(number, mine, parent[mine], lines, first[mine], stop[mine]))
    return Plan(parent, wide, stays, ballots, _moves(fate, writes, lines_of(voted, torch.arange(len(lost)))))


def _moves(fate: Fate, writes: list[Write], voted: Tensor) -> list[Move]:
    """Which rows are laid elsewhere, by where they lie and whether they lose something."""
    lost = fate.keep < fate.held
    moved = (fate.whence != torch.arange(len(fate.whence))) | (lost | fate.begun)[fate.which]
    moved &= fate.keep[fate.which] > 0
    lies = torch.full_like(fate.parent, -1)
    for number, write in enumerate(writes):
        if write.pair is not None:
            lies[torch.isin(fate.parent, write.where.rows)] = number
    kinds = torch.stack((lies, lost.long()), 1)[fate.which]  # [R', 2]
    moves = []
    for source, loses in sorted(set(map(tuple, kinds[moved].tolist()))):
        rows = (moved & (kinds == torch.tensor([source, loses])).all(1)).nonzero().squeeze(1)
        which, line = torch.unique(fate.which[rows], return_inverse=True)
        again = None if torch.equal(line, torch.arange(len(which))) else line
        moves.append(Move(source, rows, which, again, voted[which] if loses else None))
    return moves
