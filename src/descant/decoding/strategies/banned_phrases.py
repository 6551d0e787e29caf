"""Phrase bans: a row that completes a phrase is cut back to where it began, and goes another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from descant.core.context import params_of
from descant.core.interfaces import Array
from descant.core.rows import Rows
from descant.decoding.strategies.backtracking import Doubt, Note, Rewinding, notes_of
from descant.tokenization.banned_phrases import Phrases

__all__ = ["Banning"]


class Banning(Rewinding):
    """Greedy search and sampling that say none of some phrases (Paech et al. 2025, arXiv 2510.15061).

    A row whose new text completes a phrase, across any tokens, takes back all from the token on in which it
    began. All rows are matched at once, by the state of matching that each has come to.
    """

    _watch: tuple[object, list[tuple[Phrases, Array]]] | None = None  # (version, phrases with their rows)

    def _quiet(self, rows: Rows, tokens: Array) -> bool:
        """Whether no row has anything in mind, before these tokens and after them: as nearly always."""
        if not all(note.idle for note in notes_of(rows)):
            return False
        if self._watch is None or self._watch[0] != rows.version:
            phrases: Any = params_of(rows).values["phrases"]
            self._watch = (rows.version, _users(phrases))
        for own, here in self._watch[1]:
            mine, blank = tokens[here], np.zeros(len(here), np.int64)
            if own.table.next[mine, blank].any() or own.table.hits[mine, blank].any():
                return False
        return True

    def _doubts(self, rows: Rows, tokens: Tensor) -> list[Doubt]:
        """What the phrases make of each row's token."""
        notes: list[Note] = notes_of(rows)
        phrases: Any = params_of(rows).values["phrases"]
        states, hits = _matched(notes, phrases, tokens.numpy())
        found = []
        for row, (note, token) in enumerate(zip(notes, tokens.tolist(), strict=True)):
            own, state, held = phrases[row], int(states[row]), [*note.held, token]
            place = own.began(held, _unread(rows, row, own, note)) if hits[row] else None
            if place is None:
                found.append(Doubt(own.under_way(state, held), 0, state))
            else:
                found.append(Doubt(back=len(held) - place))
        return found


def _matched(notes: Sequence[Note], phrases: Any, tokens: Array) -> tuple[Array, Array]:
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


def _unread(rows: Rows, row: int, phrases: Phrases, note: Note) -> int:
    """How many bytes of what a row holds are the prompt's own, which token healing has it say again."""
    tails: Any = params_of(rows).values.get("healing")
    tail = None if tails is None else tails[row]
    if tail is None or not len(tail):
        return 0
    start, stop = int(rows.prompt[row]), int(rows.length[row]) - len(note.held)
    return max(0, len(tail.text) - phrases.size(rows.tokens[row, start:stop].tolist()))
