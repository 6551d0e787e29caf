"""Finished-hypothesis pools of beam search, and the test whether they can still improve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from descant.core.interfaces import Array

__all__ = ["BeamScoring", "FinishedHypotheses", "bank_order", "top_unfinished"]

HypothesisFactory = Callable[[Sequence[tuple[int, int, float]]], Sequence[Any]]


class BeamScoring(NamedTuple):
    """The scoring parameters of each request [B]."""

    num_new_tokens: Array  # new tokens of a candidate
    max_new_tokens: Array  # maximum number of new tokens
    early_stopping: (
        Array  # 0: compare at the current length, 1: stop when full, 2: compare at the best length
    )
    length_penalty: Array  # exponent of the length that divides a sum

    def normalized_scores(self, sums: Array) -> Array:
        """The length-normalised scores of hypotheses that finish now, from their sums [B, n]."""
        return np.asarray(sums / _length_norms(self.num_new_tokens, self.length_penalty)[:, None])

    def best_attainable(self, best: Array) -> Array:
        """The best score that a running sum [B] can reach."""
        length = np.where(
            (self.early_stopping == 2) & (self.length_penalty > 0), self.max_new_tokens, self.num_new_tokens
        )
        return np.asarray(best / _length_norms(length, self.length_penalty))


class FinishedHypotheses:
    """The `size` best finished hypotheses of every key, best first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._keys: Array = np.zeros(0, dtype=np.int64)  # [M] ascending
        self.scores: Array = np.zeros((0, size))  # [M, S] best first, -inf where empty
        self._entries: Array = np.zeros((0, size), dtype=object)  # [M, S] None where empty
        self._has_entries: tuple[Array, bool] = (self.scores, False)  # whether these scores have any

    def add_keys(self, keys: Array) -> None:
        """Add an empty pool for every new key."""
        new = keys[~np.isin(keys, self._keys)]
        if not len(new):
            return
        shape = (len(new), self.size)
        self._keys = np.concatenate((self._keys, new))
        self.scores = np.concatenate((self.scores, np.full(shape, -np.inf)))
        self._entries = np.concatenate((self._entries, np.full(shape, None)))
        order = np.argsort(self._keys)
        self._keys, self.scores, self._entries = (
            part[order] for part in (self._keys, self.scores, self._entries)
        )

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the pools of now."""
        return partial(self._restore, self._keys, self.scores, self._entries)  # never written in place

    def _restore(self, keys: Array, scores: Array, entries: Array) -> None:
        self._keys, self.scores, self._entries = keys, scores, entries

    def remove_key(self, key: int) -> None:
        """Remove a key's pool."""
        keep = self._keys != key
        self._keys, self.scores, self._entries = (
            part[keep] for part in (self._keys, self.scores, self._entries)
        )

    def indices_of(self, keys: Array) -> Array:
        """The pool index of each key."""
        return np.searchsorted(self._keys, keys)

    def get(self, key: int) -> list[Any]:
        """A key's entries, best first."""
        index = np.flatnonzero(self._keys == key)
        return [entry for entry in self._entries[index].flatten() if entry is not None]

    def is_full(self, indices: Array) -> Array:
        """Which pools are full [B]."""
        return np.asarray(self.scores[indices, -1] > -np.inf)

    def is_empty(self, indices: Array) -> Array:
        """Which pools are empty [B]."""
        return np.asarray(self.scores[indices, 0] == -np.inf)

    @property
    def has_entries(self) -> bool:
        """Whether any pool has an entry; computed once for a state, as scores are never written in place."""
        if self._has_entries[0] is not self.scores:
            self._has_entries = self.scores, bool((self.scores[:, :1] > -np.inf).any())
        return self._has_entries[1]

    def insert_best(self, indices: Array, scores: Array, make: HypothesisFactory) -> list[Any]:
        """Insert the hypotheses that are good enough, from scores [B, n] (-inf: none).

        `make` builds the accepted ones, each given as (request index, rank, score); they are returned.
        """
        merged = np.concatenate((self.scores[indices], scores), 1)
        order = np.argsort(-merged, axis=1, kind="stable")[:, : self.size]
        best = np.take_along_axis(merged, order, 1)
        accepted = np.argwhere((order >= self.size) & (best > -np.inf))
        if not len(accepted):
            return []
        requested = [
            (index, order[index, rank] - self.size, best[index, rank]) for index, rank in accepted.tolist()
        ]
        entries = make([(index, int(candidate), float(score)) for index, candidate, score in requested])
        previous = np.concatenate((self._entries[indices], np.full(scores.shape, None)), 1)
        pools = np.take_along_axis(previous, order, 1)
        for (index, rank), entry in zip(accepted.tolist(), entries, strict=True):
            pools[index, rank] = entry
        self.scores, self._entries = self.scores.copy(), self._entries.copy()
        self.scores[indices], self._entries[indices] = best, pools
        return list(entries)

    def can_improve(self, indices: Array, scoring: BeamScoring, best: Array) -> Array:
        """Which pools a running hypothesis with the sum `best` [B] can still improve."""
        worst = self.scores[indices, -1]
        full = worst > -np.inf
        if not full.any():
            return np.asarray(best > -np.inf)
        can_enter = (best > -np.inf) & ~(full & (scoring.early_stopping == 1))
        return np.asarray(can_enter & (~full | (scoring.best_attainable(best) > worst)))


def top_unfinished(sums: Array, finished: Array, width: int) -> Array:
    """The ranks of the `width` best candidates that do not finish [B, W]."""
    return np.argsort(-np.where(finished, -np.inf, sums), axis=1, kind="stable")[:, :width]


def bank_order(banks: Array, sums: Array, width: int) -> Array:
    """The order in which candidates are kept: the best of every bank, then the second best, and so on.

    A bank is the number of constraint steps a candidate has met; higher banks come first (Post and Vilar
    2018, arXiv 1804.06609).
    """
    order = np.lexsort((-sums, -banks))
    _, bank_index = np.unique(-banks[order], return_inverse=True)
    rank = np.arange(len(order)) - np.searchsorted(bank_index, bank_index)
    return np.asarray(order[np.lexsort((bank_index, rank))][:width])


def _length_norms(lengths: Array, penalties: Array) -> Array:
    """`length ** penalty` in float64, which cannot overflow for allowed penalties [B]."""
    return np.power(lengths.astype(np.float64), penalties)
