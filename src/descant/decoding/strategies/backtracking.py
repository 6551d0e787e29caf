"""Rewinding: a row is cut back to where something began that must not be, and goes another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import Hypothesis, Output, Proposal, Selection, Tokens, Told
from descant.core.rows import Column, Rows, pick
from descant.decoding.strategies.sampling import Sampling, over
from descant.errors import InputError

__all__ = ["Doubt", "Note", "Rewinding", "notes_of"]

NO_MASK = torch.full((1, 1), -1)
NOBODY: Mapping[int, frozenset[int]] = {}


class Doubt(NamedTuple):
    """What becomes of a row's last tokens, the one that it has just chosen among them."""

    loose: int = 0  # how many of them may still be taken back
    back: int = 0  # how many of them are, now: the first of these is not said again at its place
    state: int = 0  # of who reads token by token: what is to be found again should the row come back here


class _Mark(NamedTuple):
    """A place between tokens: the state of who reads there, and how many tokens before it are not certain."""

    state: int
    back: int


BLANK = _Mark(0, 0)


class Note(NamedTuple):
    """What a row keeps: its last tokens that may still be taken back, and what it may not say there.

    `marks` stand before the first of `held` and after each, `masks` go by place among them.
    """

    begun: bool = True  # whether its request has split up into rows
    held: tuple[int, ...] = ()
    marks: tuple[_Mark, ...] = (BLANK,)
    masks: Mapping[int, frozenset[int]] = NOBODY
    cuts: int = 0  # how often it was cut back

    def said(self, token: int, doubt: Doubt) -> tuple[Note, tuple[int, ...]]:
        """The note after a token, and the tokens certain now."""
        held, back = (*self.held, token), doubt.loose
        # Cut back to any place that far before, the row would stand where even earlier tokens may go.
        before = [step + self.marks[-step].back for step in range(1, back + 1)]
        back = max([back, *before])
        if not back:
            return Note(cuts=self.cuts) if self.cuts else IDLE, held
        marks = (*self.marks, _Mark(doubt.state, back))
        sure = len(held) - back
        masks = {place - sure: some for place, some in self.masks.items() if place >= sure}
        return Note(True, held[sure:], marks[sure:], masks or NOBODY, self.cuts), held[:sure]

    def cut(self, place: int, token: int) -> Note:
        """The note of a row cut back to that place, where it may not say `token` again."""
        masks = {at: some for at, some in self.masks.items() if at <= place}
        masks[place] = masks.get(place, frozenset()) | {token}
        return Note(True, self.held[:place], self.marks[: place + 1], masks, self.cuts + 1)

    @property
    def idle(self) -> bool:
        """Whether there is nothing that it could take back."""
        return self.begun and not self.held and not self.masks

    @property
    def masked(self) -> list[int]:
        """What the row may not say next."""
        return sorted(self.masks.get(len(self.held), ()))


START, IDLE = Note(begun=False), Note()


@dataclass(frozen=True)
class _Notes:
    """The column of notes."""

    notes: list[Note]
    constant: ClassVar[bool] = False

    def take(self, parents: Tensor) -> Self:
        """The notes of the new rows."""
        return type(self)([self.notes[row] for row in parents.tolist()])

    def cat(self, other: Self) -> Self:
        """These rows' notes with another table's below."""
        return type(self)([*self.notes, *other.notes])


class _Verdict(NamedTuple):
    """What doubts make of the tokens chosen."""

    notes: list[Note]  # [R]
    told: list[tuple[int, ...]]  # [R] the tokens of each row that are certain now
    back: Array  # [R] how many tokens a row takes back, -1 where the chosen one stays


class Rewinding(Sampling):
    """Greedy search and sampling whose rows may take tokens back; a subclass says which, in `doubt`.

    A row is cut back to before the first of them, which is masked there for as long as the text before it
    stays. Tokens come out once nothing can take them back, so that nothing told is ever untold. The mask is
    a stage of its own, too, before all samplers.
    """

    rewinds = True
    columns: Mapping[str, Tensor | Column] = {"notes": _Notes([START]), "masked": NO_MASK}

    def doubt(self, written: Sequence[int], cuts: int) -> Doubt:
        """What to make of a row's new tokens, the last just chosen; it was cut back `cuts` times before.

        No more can go now than were loose before, and the token just chosen.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `doubt`")

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:  # noqa: ARG002
        """One token a row, or some taken back; rows that end leave."""
        scores = output.logits[:, 0]  # [R, V]
        rows, parents = self._fanned(rows)
        if parents is not None:
            scores = pick(scores, parents)
        # Once more, after what forces tokens, and after a user's own: otherwise a row would never get on.
        tokens, best, host = self._chosen(rows, _without(scores, rows.column("masked")))
        quiet = bool(best.min() > -np.inf) and self._quiet(rows, host.numpy())
        if quiet:
            reasons = self._stop.ended(rows, None, host)
            if not reasons:  # nothing changes but the tokens
                emitted = Tokens(rows.request, rows.slot, host, parents)
                slot = None if parents is None else rows.slot
                return Selection(tokens, parents, slot=slot, emitted=emitted, host=host)
        failed = sorted(set(rows.request.numpy()[~(best > -np.inf)].tolist()))
        gone = np.isin(rows.request.numpy(), failed)
        verdict = _judged(rows, host.tolist(), self._doubts(rows, host), gone)
        stays = verdict.back < 0
        if not quiet:
            reasons = self._ends(rows, host, stays & ~gone)
        for _, which in reasons:
            gone = gone | which
        retired = self._retired(rows, host, gone, reasons, failed) if gone.any() else []
        keep = torch.from_numpy(np.flatnonzero(~gone))
        whence = torch.arange(len(rows)) if parents is None else parents
        accepted = torch.from_numpy(np.where(stays, 0, -verdict.back))[keep]
        kept = [verdict.notes[row] for row in keep.tolist()]
        moved = parents is not None or len(keep) < len(rows)
        return Selection(
            pick(tokens, keep) if moved else tokens,
            whence[keep] if moved else None,
            None if stays.all() else accepted,
            slot=rows.slot[keep] if moved else None,
            columns={"notes": _Notes(kept), "masked": _masked(kept)},
            emits=bool(stays.all()) or torch.from_numpy(np.where(stays, 1, -1))[keep],
            emitted=_told(rows, whence, verdict, dict(retired), failed),
            finished=over(rows, gone, failed),
            failed=failed,
            host=host[keep],
            retired=[(int(whence[row]), one) for row, one in retired],
            told=Told(whence, rows.slot),
        )

    def _fresh(self, rows: Rows) -> Tensor:
        """Which rows have not split up yet: one may be back at its prompt."""
        return torch.tensor([not note.begun for note in notes_of(rows)])

    def _quiet(self, rows: Rows, tokens: Array) -> bool:  # noqa: ARG002
        """Whether it is known at once that no row takes back or holds anything, before and after these."""
        return False

    def _doubts(self, rows: Rows, tokens: Tensor) -> list[Doubt]:
        """What to make of each row's token [R] (host)."""
        written = rows.tokens.cpu()
        doubts = []
        for row, (note, token) in enumerate(zip(notes_of(rows), tokens.tolist(), strict=True)):
            new = written[row, int(rows.prompt[row]) : int(rows.length[row])].tolist()
            doubts.append(self.doubt([*new, token], note.cuts))
        return doubts

    def _ends(self, rows: Rows, host: Tensor, asked: Array) -> Sequence[tuple[str, Array]]:
        """Why rows end, of those that keep their token."""
        if asked.all():
            return self._stop.ended(rows, None, host)
        index = torch.from_numpy(np.flatnonzero(asked))
        reasons = []
        for name, which in self._stop.ended(rows, index, host[index]):
            whole = np.zeros(len(rows), dtype=bool)
            whole[index.numpy()] = which
            reasons.append((name, whole))
        return reasons


def _without(scores: Tensor, masked: Tensor) -> Tensor:
    """The scores [R, V] without the tokens that each row may not say [R, W] (host)."""
    row, column = (masked >= 0).nonzero(as_tuple=True)
    if not len(row):
        return scores
    scores = scores.clone()
    scores[row.to(scores.device), masked[row, column].to(scores.device)] = -torch.inf
    return scores


def notes_of(rows: Rows) -> list[Note]:
    """What the rows keep."""
    column = rows.columns["notes"]
    assert isinstance(column, _Notes)
    return column.notes


def _judged(rows: Rows, tokens: Sequence[int], doubts: Sequence[Doubt], dead: Array) -> _Verdict:
    """What becomes of each row's token, of rows that are not dead."""
    found: list[Note] = []
    told: list[tuple[int, ...]] = []
    back = np.full(len(rows), -1)
    for row, (note, token, doubt) in enumerate(zip(notes_of(rows), tokens, doubts, strict=True)):
        certain: tuple[int, ...] = ()
        if doubt.back and not dead[row]:
            place = len(note.held) + 1 - doubt.back
            if place < 0:
                must = f"must not take back more than the {len(note.held)} that were loose, and the new one"
                raise InputError("doubt", must, doubt.back, "let it say of more tokens that they are loose")
            back[row] = doubt.back - 1
            note = note.cut(place, (*note.held, token)[place])
        else:
            note, certain = note.said(token, doubt)
        found.append(note)
        told.append(certain)
    return _Verdict(found, told, back)


def _masked(notes: Sequence[Note]) -> Tensor:
    """What each row may not say next, -1 where there is nothing [R, W] (host)."""
    lines = [note.masked if note.masks else [] for note in notes]
    wide = max(map(len, lines), default=0)
    if not wide:
        return NO_MASK.expand(len(notes), 1)
    return torch.tensor([[*line, *[-1] * (wide - len(line))] for line in lines])


def _told(
    rows: Rows, whence: Tensor, verdict: _Verdict, ended: Mapping[int, Hypothesis], failed: Sequence[int]
) -> Tokens | None:
    """The tokens that are certain now: all of a row that ends."""
    line: list[int] = []
    token: list[int] = []
    place: list[int] = []
    last: dict[int, Hypothesis] = {}
    new = (rows.length - rows.prompt).tolist()
    for row, (note, certain) in enumerate(zip(verdict.notes, verdict.told, strict=True)):
        if int(rows.request[row]) in failed:
            continue
        ends = row in ended
        out = (*certain, *note.held) if ends else certain
        # After its choice the row has a token more, and the last of what it still holds is that one.
        first = new[row] + 1 - len(certain) - len(note.held)
        line += [row] * len(out)
        token += out
        place += range(first, first + len(out))
        if ends:
            last[len(line) - 1] = ended[row]
    if not line:
        return None
    index = torch.tensor(line)
    return Tokens(
        rows.request[index],
        rows.slot[index],
        torch.tensor(token),
        whence[index],
        ended=last,
        place=torch.tensor(place),
    )
