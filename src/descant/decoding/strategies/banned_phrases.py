"""Banned phrases: a row that completes a banned phrase backtracks to where the phrase began."""

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
    """Greedy search and sampling without the banned phrases (Paech et al. 2025, arXiv 2510.15061).

    When a row's new text completes a phrase, across any token boundaries, the row removes all tokens from the
    one in which the phrase began. All rows are matched at once, each from its own matcher state.
    """

    # (table version, each matcher with its rows)
    _phrase_rows: tuple[object, list[tuple[PhraseMatcher, Array]]] | None = None

    def _can_skip_inspection(self, rows: Rows, tokens: Array) -> bool:
        """Whether no row is inside a phrase before or after these tokens: the common case."""
        if not all(pending.is_idle for pending in pending_tokens_of(rows)):
            return False
        if self._phrase_rows is None or self._phrase_rows[0] != rows.version:
            matchers: Any = row_params(rows).values["phrase_matcher"]
            self._phrase_rows = (rows.version, _rows_by_phrases(matchers))
        for phrases, index in self._phrase_rows[1]:
            row_tokens, initial_states = tokens[index], np.zeros(len(index), np.int64)
            if (
                phrases.matcher.transition[row_tokens, initial_states].any()
                or phrases.matcher.matches[row_tokens, initial_states].any()
            ):
                return False
        return True

    def _inspect_rows(self, rows: Rows, tokens: Tensor) -> list[Retraction]:
        """The retraction of each row for its chosen token."""
        pending_rows: list[PendingTokens] = pending_tokens_of(rows)
        matchers: Any = row_params(rows).values["phrase_matcher"]
        states, matches = _advance_matchers(pending_rows, matchers, tokens.numpy())
        retractions = []
        for row, (pending, token) in enumerate(zip(pending_rows, tokens.tolist(), strict=True)):
            phrases, state, recent = matchers[row], int(states[row]), [*pending.tokens, token]
            start = (
                phrases.match_start(recent, _healed_prompt_bytes(rows, row, phrases, pending))
                if matches[row]
                else None
            )
            if start is None:
                retractions.append(Retraction(phrases.partial_tokens(state, recent), 0, state))
            else:
                retractions.append(Retraction(backtrack=len(recent) - start))
        return retractions


def _advance_matchers(
    pending_rows: Sequence[PendingTokens], matchers: Any, tokens: Array
) -> tuple[Array, Array]:
    """The matcher state after each row's token [R], and whether it completes a phrase [R]."""
    previous = np.array([pending.checkpoints[-1].matcher_state for pending in pending_rows])
    states, matches = np.zeros(len(pending_rows), np.int64), np.zeros(len(pending_rows), dtype=bool)
    for phrases, index in _rows_by_phrases(matchers):
        states[index] = phrases.matcher.transition[tokens[index], previous[index]]
        matches[index] = phrases.matcher.matches[tokens[index], previous[index]]
    return states, matches


def _rows_by_phrases(matchers: Any) -> list[tuple[PhraseMatcher, Array]]:
    """Each distinct matcher with the indices of its rows."""
    distinct = {id(matcher): matcher for matcher in matchers}
    ids = np.array([id(matcher) for matcher in matchers])
    return [(matcher, np.flatnonzero(ids == key)) for key, matcher in distinct.items()]


def _healed_prompt_bytes(rows: Rows, row: int, phrases: PhraseMatcher, pending: PendingTokens) -> int:
    """How many bytes of a row's pending tokens repeat the prompt's healed suffix."""
    suffixes: Any = row_params(rows).values.get("healed_suffix")
    suffix = None if suffixes is None else suffixes[row]
    if suffix is None or not len(suffix):
        return 0
    start, stop = int(rows.prompt_length[row]), int(rows.length[row]) - len(pending.tokens)
    return max(0, len(suffix.text) - phrases.num_bytes(rows.tokens[row, start:stop].tolist()))
