"""Which rows of a cache descend from one, and how much they still share of it."""

from __future__ import annotations

from itertools import count

import numpy as np

from descant.core.interfaces import Array

__all__ = ["PrefixGroups"]


class PrefixGroups:
    """Families of rows: those of one family have the same in their first positions.

    Rows that descend from one ancestor hold the same wherever neither was cut since they parted, so that a
    row that takes the place of its kin need only copy what comes after: a beam search never moves its prompt.
    """

    def __init__(self) -> None:
        self._group_ids: Array = np.zeros(0, dtype=np.int64)  # [R]
        self._shared_lengths: Array = np.zeros(0, dtype=np.int64)  # [R] how many positions that is
        self._next_id = count(1)

    def extend(self, rows: int) -> None:
        """Append rows that are nobody's kin."""
        names = np.array([next(self._next_id) for _ in range(rows)], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, names))
        self._shared_lengths = np.concatenate((self._shared_lengths, np.zeros(rows, dtype=np.int64)))

    def shared_length(self, one: Array, other: Array) -> Array:
        """How many first positions each of some rows shares with another [N]; 0 if there is no such row."""
        there = one < len(self._group_ids)
        held = np.where(there, one, 0)
        kin = there & (self._group_ids[held] == self._group_ids[other])
        return np.where(kin, np.minimum(self._shared_lengths[held], self._shared_lengths[other]), 0)

    def commit(self, parents: Array | None, lengths: Array) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) cut to `lengths[i]`."""
        if parents is not None:
            old, family, shared = (
                len(self._group_ids),
                self._group_ids[parents],
                self._shared_lengths[parents],
            )
            _, number = np.unique(family, return_inverse=True)
            first, last = np.full(len(family), old), np.full(len(family), -1)
            np.minimum.at(first, number, parents)
            np.maximum.at(last, number, parents)
            # A family whose rows all continue one row has in common all that this row had.
            self._group_ids, self._shared_lengths = family, np.where((first == last)[number], lengths, shared)
        self._shared_lengths = np.minimum(self._shared_lengths, lengths)

    def select(self, rows: Array, lengths: Array) -> PrefixGroups:
        """The same of copies of some rows: those of one row have all in common that it has."""
        other = PrefixGroups()
        other._group_ids, other._shared_lengths = rows + 1, lengths.copy()
        other._next_id = count(int(rows.max(initial=0)) + 2)
        return other

    def join(self, other: PrefixGroups) -> None:
        """Take the rows of another table below these."""
        names, number = np.unique(other._group_ids, return_inverse=True)
        fresh = np.array([next(self._next_id) for _ in names], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, fresh[number] if len(number) else number))
        self._shared_lengths = np.concatenate((self._shared_lengths, other._shared_lengths))
