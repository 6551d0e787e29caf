"""Phrase bans: a row that completes a phrase is cut back to where it began, and goes another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.context import params_of
from descant.phrases import Phrases
from descant.ports import Array
from descant.rows import Column, Rows, pick
from descant.step import Hypothesis, Output, Proposal, Selection, Tokens, Told
from descant.strategies.sampling import Sampling, over

__all__ = ["Rewinding"]

NO_MASK = torch.full((1, 1), -1)
NOBODY: Mapping[int, frozenset[int]] = {}


class _Mark(NamedTuple):
    """A place between tokens: the state of matching there, and how many tokens before it are not certain."""

    state: int
    back: int


BLANK = _Mark(0, 0)


class _Note(NamedTuple):
    """What a row keeps: its last tokens that may still be taken back, and what it may not say there.

    `marks` stand before the first of `held` and after each, `masks` go by place among them.
    """

    begun: bool = True  # whether its request has split up into rows
    held: tuple[int, ...] = ()
    marks: tuple[_Mark, ...] = (BLANK,)
    masks: Mapping[int, frozenset[int]] = NOBODY

    def said(self, phrases: Phrases, token: int, state: int) -> tuple[_Note, tuple[int, ...]]:
        """The note after a token that brought the matching to `state`, and the tokens certain now."""
        held = (*self.held, token)
        back = phrases.under_way(state, held)
        # Cut back to any place that far before, the row would stand where even earlier tokens may go.
        before = [step + self.marks[-step].back for step in range(1, back + 1)]
        back = max([back, *before])
        if not back:
            return IDLE, held
        marks = (*self.marks, _Mark(state, back))
        sure = len(held) - back
        masks = {place - sure: some for place, some in self.masks.items() if place >= sure}
        return _Note(True, held[sure:], marks[sure:], masks or NOBODY), held[:sure]

    def cut(self, place: int, token: int) -> _Note:
        """The note of a row cut back to that place, where it may not say `token` again."""
        masks = {at: some for at, some in self.masks.items() if at <= place}
        masks[place] = masks.get(place, frozenset()) | {token}
        return _Note(True, self.held[:place], self.marks[: place + 1], masks)

    @property
    def masked(self) -> list[int]:
        """What the row may not say next."""
        return sorted(self.masks.get(len(self.held), ()))


START, IDLE = _Note(begun=False), _Note()


@dataclass(frozen=True)
class _Notes:
    """The column of notes."""

    notes: list[_Note]
    constant: ClassVar[bool] = False

    def take(self, parents: Tensor) -> Self:
        """The notes of the new rows."""
        return type(self)([self.notes[row] for row in parents.tolist()])

    def cat(self, other: Self) -> Self:
        """These rows' notes with another table's below."""
        return type(self)([*self.notes, *other.notes])


class _Verdict(NamedTuple):
    """What the bans make of the tokens chosen."""

    notes: list[_Note]  # [R]
    told: list[tuple[int, ...]]  # [R] the tokens of each row that are certain now
    back: Array  # [R] how many tokens a row takes back, -1 where the chosen one stays


class Rewinding(Sampling):
    """Greedy search and sampling that say none of some phrases (Paech et al. 2025, arXiv 2510.15061).

    A row whose new text completes a phrase, across any tokens, is cut back to before the token in which it
    began, and that token is masked there for as long as the text before it stays. Tokens come out once no
    phrase can take them back. The mask is a stage of its own, too, before all samplers.
    """

    columns: Mapping[str, Tensor | Column] = {"notes": _Notes([START]), "masked": NO_MASK}
    _watch: tuple[object, list[tuple[Phrases, Array]]] | None = None  # (version, phrases with their rows)

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
            if not reasons:  # as nearly always: nobody is near a phrase, and nothing changes but the tokens
                emitted = Tokens(rows.request, rows.slot, host, parents)
                slot = None if parents is None else rows.slot
                return Selection(tokens, parents, slot=slot, emitted=emitted, host=host)
        failed = sorted(set(rows.request.numpy()[~(best > -np.inf)].tolist()))
        gone = np.isin(rows.request.numpy(), failed)
        verdict = _judged(rows, host.tolist(), gone)
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
        return torch.tensor([not note.begun for note in _notes(rows)])

    def _quiet(self, rows: Rows, tokens: Array) -> bool:
        """Whether no row has anything in mind, before these tokens and after them."""
        notes = _notes(rows)
        if any(note is not IDLE for note in notes):
            return False
        if self._watch is None or self._watch[0] != rows.version:
            phrases: Any = params_of(rows).values["phrases"]
            self._watch = (rows.version, _users(phrases))
        for own, here in self._watch[1]:
            mine, blank = tokens[here], np.zeros(len(here), np.int64)
            if own.table.next[mine, blank].any() or own.table.hits[mine, blank].any():
                return False
        return True

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


def _notes(rows: Rows) -> list[_Note]:
    column = rows.columns["notes"]
    assert isinstance(column, _Notes)
    return column.notes


def _judged(rows: Rows, tokens: Sequence[int], dead: Array) -> _Verdict:
    """What becomes of each row's token, of rows that are not dead."""
    notes: list[_Note] = _notes(rows)
    phrases: Any = params_of(rows).values["phrases"]
    states, hits = _matched(notes, phrases, np.array(tokens))
    found: list[_Note] = []
    told: list[tuple[int, ...]] = []
    back = np.full(len(rows), -1)
    for row, (note, token) in enumerate(zip(notes, tokens, strict=True)):
        own, place = phrases[row], None
        if hits[row] and not dead[row]:
            place = own.began([*note.held, token], _unread(rows, row, own, note))
        if place is None:
            note, certain = note.said(own, token, int(states[row]))
        else:
            back[row] = len(note.held) - place
            note, certain = note.cut(place, (*note.held, token)[place]), ()
        found.append(note)
        told.append(certain)
    return _Verdict(found, told, back)


def _matched(notes: Sequence[_Note], phrases: Any, tokens: Array) -> tuple[Array, Array]:
    """The state of matching after each row's token [R], and whether it completes a phrase [R]."""
    before = np.array([note.marks[-1].state for note in notes])
    states, hits = np.zeros(len(notes), np.int64), np.zeros(len(notes), dtype=bool)
    for own, here in _users(phrases):
        states[here] = own.table.next[tokens[here], before[here]]
        hits[here] = own.table.hits[tokens[here], before[here]]
    return states, hits


def _users(phrases: Any) -> list[tuple[Phrases, Array]]:
    """The phrases of the rows [R], each with the rows whose they are."""
    found = {id(one): one for one in phrases}
    names = np.array([id(one) for one in phrases])
    return [(one, np.flatnonzero(names == name)) for name, one in found.items()]


def _unread(rows: Rows, row: int, phrases: Phrases, note: _Note) -> int:
    """How many bytes of what a row holds are the prompt's own, which token healing has it say again."""
    tails: Any = params_of(rows).values.get("healing")
    tail = None if tails is None else tails[row]
    if tail is None or not len(tail):
        return 0
    start, stop = int(rows.prompt[row]), int(rows.length[row]) - len(note.held)
    return max(0, len(tail.text) - phrases.size(rows.tokens[row, start:stop].tolist()))


def _masked(notes: Sequence[_Note]) -> Tensor:
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
