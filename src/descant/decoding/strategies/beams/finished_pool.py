"""Pools: the best sequences that beams have ended with, and whether anything better can still come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from descant.core.interfaces import Array

__all__ = ["BeamScoring", "FinishedHypotheses", "bank_order", "top_unfinished"]

HypothesisFactory = Callable[[Sequence[tuple[int, int, float]]], Sequence[Any]]


class BeamScoring(NamedTuple):
    """How the candidates of each pool are judged [B]."""

    num_new_tokens: Array  # how many new tokens a candidate has
    max_new_tokens: Array  # how many it may have
    early_stopping: (
        Array  # 0: by the present length, 1: when the pool is full, 2: when nothing longer can win
    )
    length_penalty: Array  # power of the length that divides a sum

    def normalized_scores(self, sums: Array) -> Array:
        """The scores of sequences that end now, of their sums [B, n]."""
        return np.asarray(sums / _length_norms(self.num_new_tokens, self.length_penalty)[:, None])

    def best_attainable(self, best: Array) -> Array:
        """The best score that the best running sum [B] can come to."""
        length = np.where(
            (self.early_stopping == 2) & (self.length_penalty > 0), self.max_new_tokens, self.num_new_tokens
        )
        return np.asarray(best / _length_norms(length, self.length_penalty))


class FinishedHypotheses:
    """The `size` best ended sequences of every key, best first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._keys: Array = np.zeros(0, dtype=np.int64)  # [M] ascending
        self.scores: Array = np.zeros((0, size))  # [M, S] best first, -inf where none yet
        self._entries: Array = np.zeros((0, size), dtype=object)  # [M, S] None where none yet

    def add_keys(self, keys: Array) -> None:
        """An empty pool for every key that has none."""
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

    def remove_key(self, key: int) -> None:
        """Forget a key."""
        keep = self._keys != key
        self._keys, self.scores, self._entries = (
            part[keep] for part in (self._keys, self.scores, self._entries)
        )

    def indices_of(self, keys: Array) -> Array:
        """The line of each key."""
        return np.searchsorted(self._keys, keys)

    def get(self, key: int) -> list[Any]:
        """A key's entries, best first."""
        line = np.flatnonzero(self._keys == key)
        return [entry for entry in self._entries[line].flatten() if entry is not None]

    def is_full(self, lines: Array) -> Array:
        """Which pools hold as many as they can [B]."""
        return np.asarray((self.scores[lines] > -np.inf).all(1))

    def is_empty(self, lines: Array) -> Array:
        """Which pools hold nothing [B]."""
        return ~np.asarray((self._entries[lines] != np.array(None)).any(1))

    def insert_best(
        self, lines: Array, shares: Array, make: Callable[[Sequence[tuple[int, int, float]]], Sequence[Any]]
    ) -> list[Any]:
        """Take the sequences in that are good enough, of scores `shares` [B, n], -inf where there is none.

        `make` is told which enter, each as line, place and score; what it makes of them is returned.
        """
        merged = np.concatenate((self.scores[lines], shares), 1)
        order = np.argsort(-merged, axis=1, kind="stable")[:, : self.size]
        best = np.take_along_axis(merged, order, 1)
        enters = np.argwhere((order >= self.size) & (best > -np.inf))
        if not len(enters):
            return []
        wanted = [(line, order[line, rank] - self.size, best[line, rank]) for line, rank in enters.tolist()]
        made = make([(line, int(place), float(score)) for line, place, score in wanted])
        old = np.concatenate((self._entries[lines], np.full(shares.shape, None)), 1)
        pools = np.take_along_axis(old, order, 1)
        for (line, rank), entry in zip(enters.tolist(), made, strict=True):
            pools[line, rank] = entry
        self.scores[lines], self._entries[lines] = best, pools
        return list(made)

    def can_improve(self, lines: Array, terms: BeamScoring, best: Array) -> Array:
        """Which pools can still be bettered by a running sequence of the sum `best` [B]."""
        scores = self.scores[lines]
        full = self.is_full(lines)
        able = (best > -np.inf) & ~(full & (terms.early_stopping == 1))
        return np.asarray(able & (~full | (terms.best_attainable(best) > scores.min(1))))


def top_unfinished(sums: Array, ends: Array, width: int) -> Array:
    """The places of the `width` best candidates that do not end, of those best first [B, W]."""
    return np.argsort(-np.where(ends, -np.inf, sums), axis=1, kind="stable")[:, :width]


def bank_order(banks: Array, sums: Array, width: int) -> Array:
    """The order in which candidates are kept: the best of every bank, then the second of every bank, ...

    A bank is how much of the constraints a candidate has met; higher banks come first (Post and Vilar
    2018, arXiv 1804.06609).
    """
    order = np.lexsort((-sums, -banks))
    _, number = np.unique(-banks[order], return_inverse=True)
    rank = np.arange(len(order)) - np.searchsorted(number, number)
    return np.asarray(order[np.lexsort((number, rank))][:width])


def _length_norms(lengths: Array, penalties: Array) -> Array:
    """`length ** penalty` in float64, whose range no penalty that is allowed exceeds [B]."""
    return np.power(lengths.astype(np.float64), penalties)
