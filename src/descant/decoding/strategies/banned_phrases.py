"""Phrase bans: a row that completes a phrase is cut back to where it began, and goes another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array
from descant.core.rows import Rows
from descant.decoding.strategies.backtracking import (
    Backtracking,
    PendingTokens,
    Retraction,
    pending_tokens_of,
)
from descant.tokenization.banned_phrases import PhraseMatcher

__all__ = ["BannedPhraseSampling"]


class BannedPhraseSampling(Backtracking):
    """Greedy search and sampling that say none of some phrases (Paech et al. 2025, arXiv 2510.15061).

    A row whose new text completes a phrase, across any tokens, takes back all from the token on in which it
    began. All rows are matched at once, by the state of matching that each has come to.
    """

    _phrase_rows: tuple[object, list[tuple[PhraseMatcher, Array]]] | None = (
        None  # (version, phrases with their rows)
    )

    def _can_skip_inspection(self, rows: Rows, tokens: Array) -> bool:
        """Whether no row has anything in mind, before these tokens and after them: as nearly always."""
        if not all(note.is_idle for note in pending_tokens_of(rows)):
            return False
        if self._phrase_rows is None or self._phrase_rows[0] != rows.version:
            phrases: Any = row_params(rows).values["phrase_matcher"]
            self._phrase_rows = (rows.version, _rows_by_phrases(phrases))
        for own, here in self._phrase_rows[1]:
            mine, blank = tokens[here], np.zeros(len(here), np.int64)
            if own.matcher.transition[mine, blank].any() or own.matcher.matches[mine, blank].any():
                return False
        return True

    def _inspect_rows(self, rows: Rows, tokens: Tensor) -> list[Retraction]:
        """What the phrases make of each row's token."""
        notes: list[PendingTokens] = pending_tokens_of(rows)
        phrases: Any = row_params(rows).values["phrase_matcher"]
        states, hits = _advance_matchers(notes, phrases, tokens.numpy())
        found = []
        for row, (note, token) in enumerate(zip(notes, tokens.tolist(), strict=True)):
            own, state, held = phrases[row], int(states[row]), [*note.tokens, token]
            place = own.match_start(held, _healed_prompt_bytes(rows, row, own, note)) if hits[row] else None
            if place is None:
                found.append(Retraction(own.partial_tokens(state, held), 0, state))
            else:
                found.append(Retraction(backtrack=len(held) - place))
        return found


def _advance_matchers(notes: Sequence[PendingTokens], phrases: Any, tokens: Array) -> tuple[Array, Array]:
    """The state of matching after each row's token [R], and whether it completes a phrase [R]."""
    before = np.array([note.checkpoints[-1].matcher_state for note in notes])
    states, hits = np.zeros(len(notes), np.int64), np.zeros(len(notes), dtype=bool)
    for own, here in _rows_by_phrases(phrases):
        states[here] = own.matcher.transition[tokens[here], before[here]]
        hits[here] = own.matcher.matches[tokens[here], before[here]]
    return states, hits


def _rows_by_phrases(phrases: Any) -> list[tuple[PhraseMatcher, Array]]:
    """The phrases of the rows [R], each with the rows whose they are."""
    found = {id(one): one for one in phrases}
    names = np.array([id(one) for one in phrases])
    return [(one, np.flatnonzero(names == name)) for name, one in found.items()]


def _healed_prompt_bytes(rows: Rows, row: int, phrases: PhraseMatcher, note: PendingTokens) -> int:
    """How many bytes of what a row holds are the prompt's own, which token healing has it say again."""
    tails: Any = row_params(rows).values.get("healed_suffix")
    tail = None if tails is None else tails[row]
    if tail is None or not len(tail):
        return 0
    start, stop = int(rows.prompt_length[row]), int(rows.length[row]) - len(note.tokens)
    return max(0, len(tail.text) - phrases.num_bytes(rows.tokens[row, start:stop].tolist()))
