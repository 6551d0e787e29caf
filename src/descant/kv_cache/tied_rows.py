"""A cache in which several rows share one row: the codebooks of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import RowCache

__all__ = ["TiedRowCache"]

_UNTIED = -1


class TiedRowCache:
    """Rows of one sequence, all of the same length, on one or two rows of an inner cache.

    Row `i` reads inner row `row_index[i]`, and under guidance also `uncond_index[i]`. An inner row holds
    `prefix[i]` positions more than its rows: what was fed before their first token. New rows belong to no
    sequence until `tie` is called for them. An inner row is freed with the last of its rows.
    """

    def __init__(self, inner: RowCache) -> None:
        self.inner = inner
        self.row_index = torch.zeros(0, dtype=torch.long)  # [R] (host)
        self.uncond_index = torch.zeros(0, dtype=torch.long)  # [R] -1: no guidance
        self.prefix = torch.zeros(0, dtype=torch.long)  # [R]
        self._num_inner_rows = 0
        self._first: Tensor | None = None  # [N] a row of each inner row; None: not known, or rows are untied

    @property
    def max_rewind(self) -> int | None:
        """How many positions a row may be cut by."""
        return self.inner.max_rewind

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have."""
        return self.inner.capacity

    def __len__(self) -> int:
        return len(self.row_index)

    def extend(self, rows: int) -> None:
        """Append rows that belong to no sequence yet."""
        self._first = None
        self.row_index = torch.cat((self.row_index, torch.full((rows,), _UNTIED)))
        self.uncond_index = torch.cat((self.uncond_index, torch.full((rows,), _UNTIED)))
        self.prefix = torch.cat((self.prefix, torch.zeros(rows, dtype=torch.long)))

    @property
    def num_inner_rows(self) -> int:
        """The number of rows of the inner cache."""
        return self._num_inner_rows

    @property
    def untied(self) -> list[int]:
        """The rows that belong to no sequence yet."""
        if self._first is not None:
            return []
        return [int(row) for row in np.flatnonzero(self.row_index.numpy() == _UNTIED)]

    def tie(self, rows: Sequence[int], prefix: int, is_guided: bool) -> None:
        """Make these rows those of a new sequence with an empty inner row, two under guidance."""
        index, self._first = torch.tensor(rows), None
        count = 2 if is_guided else 1
        self.inner.extend(count)
        self.row_index[index] = self._num_inner_rows
        self.uncond_index[index] = self._num_inner_rows + 1 if is_guided else _UNTIED
        self.prefix[index] = prefix
        self._num_inner_rows += count

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; inner rows follow the rows they serve."""
        if parents is None and self._first is not None:
            self.inner.commit(None, self._inner_lengths(lengths, self.prefix)[self._first])
            return
        row_index, uncond_index, prefix = self.row_index, self.uncond_index, self.prefix
        if parents is not None:
            row_index, uncond_index, prefix = row_index[parents], uncond_index[parents], prefix[parents]
        used, place = np.unique(torch.cat((row_index, uncond_index)).numpy(), return_index=True)
        first = torch.from_numpy(place[used >= 0] % max(1, len(row_index)))
        used = used[used >= 0]
        # Inner rows keep their order, so that those before the first one that is freed do not move.
        is_whole = parents is None and len(used) == self._num_inner_rows
        inner_lengths = self._inner_lengths(lengths, prefix)[first]
        self.inner.commit(None if is_whole else torch.from_numpy(used), inner_lengths)
        # New rows may not have been fed yet: they are tied at their first forward.
        self._first = None if (row_index.numpy() == _UNTIED).any() else first
        if is_whole:
            return
        new_index = np.full(self._num_inner_rows + 1, _UNTIED)  # the last one is that of untied rows
        new_index[used] = np.arange(len(used))
        self.row_index = torch.from_numpy(new_index[row_index.numpy()])
        self.uncond_index = torch.from_numpy(new_index[uncond_index.numpy()])
        self.prefix = prefix
        self._num_inner_rows = len(used)

    @staticmethod
    def _inner_lengths(lengths: Tensor, prefix: Tensor) -> Tensor:
        """The positions of inner rows for those of rows: a row that was not fed has none."""
        return torch.where(lengths > 0, lengths + prefix, 0)
