"""Groups of rows that share a prefix after forks, and the length of that prefix."""

from __future__ import annotations

from itertools import count

import numpy as np

from descant.core.interfaces import Array

__all__ = ["PrefixGroups"]


class PrefixGroups:
    """Groups of rows with a common ancestor; rows of a group hold the same in their shared positions.

    A row that replaces another of its group copies only the positions after the shared prefix, so beam
    search never copies the prompt.
    """

    def __init__(self) -> None:
        self._group_ids: Array = np.zeros(0, dtype=np.int64)  # [R]
        self._shared_lengths: Array = np.zeros(0, dtype=np.int64)  # [R] positions shared within the group
        self._next_id = count(1)

    def extend(self, rows: int) -> None:
        """Append rows, each in a group of its own."""
        ids = np.array([next(self._next_id) for _ in range(rows)], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, ids))
        self._shared_lengths = np.concatenate((self._shared_lengths, np.zeros(rows, dtype=np.int64)))

    def shared_length(self, rows: Array, others: Array) -> Array:
        """The length of the prefix that `rows[i]` shares with `others[i]` [N]; 0 if `rows[i]` is new."""
        exists = rows < len(self._group_ids)
        ids = self._group_ids
        if len(rows) and exists.all() and (ids == ids[0]).all():  # beams of one request
            return np.minimum(self._shared_lengths[rows], self._shared_lengths[others])
        rows = np.where(exists, rows, 0)
        related = exists & (self._group_ids[rows] == self._group_ids[others])
        return np.where(related, np.minimum(self._shared_lengths[rows], self._shared_lengths[others]), 0)

    def commit(self, parents: Array | None, lengths: Array) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) cut to `lengths[i]`."""
        if parents is not None:
            group_ids, shared = self._group_ids[parents], self._shared_lengths[parents]
            self._group_ids = group_ids
            if len(parents) and (group_ids == group_ids[0]).all():  # beams of one request
                is_one = bool((parents == parents[0]).all())
                self._shared_lengths = lengths.copy() if is_one else np.minimum(shared, lengths)
                return
            _, first, group = np.unique(group_ids, return_index=True, return_inverse=True)
            is_split = np.zeros(len(first), dtype=bool)
            is_split[group[parents != parents[first][group]]] = True
            # Where all rows of a group continue one row, they share everything that row had.
            self._shared_lengths = np.where(is_split[group], shared, lengths)
        self._shared_lengths = np.minimum(self._shared_lengths, lengths)

    def select(self, rows: Array, lengths: Array) -> PrefixGroups:
        """The groups of copies of some rows: copies of one row share all of it."""
        other = PrefixGroups()
        other._group_ids, other._shared_lengths = rows + 1, lengths.copy()
        other._next_id = count(int(rows.max(initial=0)) + 2)
        return other

    def join(self, other: PrefixGroups) -> None:
        """Append the rows of another table."""
        old_ids, group = np.unique(other._group_ids, return_inverse=True)
        new_ids = np.array([next(self._next_id) for _ in old_ids], dtype=np.int64)
        self._group_ids = np.concatenate((self._group_ids, new_ids[group] if len(group) else group))
        self._shared_lengths = np.concatenate((self._shared_lengths, other._shared_lengths))
