"""Finished-hypothesis pools of beam search, and the test whether they can still improve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from descant.core.interfaces import Array
from descant.core.records import Hypothesis

HypothesisFactory = Callable[[Sequence[tuple[int, int, float]]], Sequence[Hypothesis]]


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
    """The pools of the `size` best finished hypotheses, best first, one for every group of every request."""

    def __init__(self, size: int, num_groups: int = 1) -> None:
        self.size, self._num_groups = size, num_groups
        self._keys: Array = np.zeros(0, dtype=np.int64)  # [M] ascending: the groups of a request in a row
        self.scores: Array = np.zeros((0, size))  # [M, S] best first, -inf where empty
        self._entries: Array = np.zeros((0, size), dtype=object)  # [M, S] None where empty
        self._has_entries: tuple[Array, bool] = (self.scores, False)  # whether these scores have any

    def add_requests(self, requests: Array) -> None:
        """Add empty pools for every new request."""
        keys = (requests[:, None] * self._num_groups + np.arange(self._num_groups)).ravel()
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

    def remove_request(self, request: int) -> None:
        """Remove a request's pools."""
        keep = self._keys // self._num_groups != request
        self._keys, self.scores, self._entries = (
            part[keep] for part in (self._keys, self.scores, self._entries)
        )

    def indices_of(self, requests: Array, group: int) -> Array:
        """The index of each request's pool of a group."""
        return np.searchsorted(self._keys, requests * self._num_groups + group)

    def get(self, request: int) -> list[Hypothesis]:
        """The hypotheses of all groups of a request, best first."""
        entries = self._entries[self._keys // self._num_groups == request].flatten()
        found = [hypothesis for hypothesis in entries if hypothesis is not None]
        return sorted(found, key=lambda hypothesis: -(hypothesis.score or 0.0))

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

    def insert_best(self, indices: Array, scores: Array, make: HypothesisFactory) -> None:
        """Insert the hypotheses that are good enough, from scores [B, n] (-inf: none).

        `make` builds the accepted ones, each given as (request index, rank, score).
        """
        merged = np.concatenate((self.scores[indices], scores), 1)
        order = np.argsort(-merged, axis=1, kind="stable")[:, : self.size]
        best = np.take_along_axis(merged, order, 1)
        accepted = np.argwhere((order >= self.size) & (best > -np.inf))
        if not len(accepted):
            return
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


def _length_norms(lengths: Array, penalties: Array) -> Array:
    """`length ** penalty` in float64, which cannot overflow for allowed penalties [B]."""
    return np.power(lengths.astype(np.float64), penalties)
