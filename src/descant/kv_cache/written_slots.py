"""How far the rows of blocks were written, so that no row reads what another one left behind its end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["WrittenSlots"]


class WrittenSlots:
    """The end of what each row of a block may hold, also behind the end of the row itself.

    Slots behind the end of a row are masked, but a mask does not hide what is not finite: zero times NaN is
    NaN. So a slot that a row can read is zero or was written by that row or its parents. Whatever another
    row has left is cleared when a row takes its place.
    """

    def __init__(self) -> None:
        self._stops: Array = np.zeros(0, dtype=np.int64)  # [R] rows behind the last one are not written
        # The first rows may be written up to a common stop, which is not in `_stops` yet.
        self._num_first, self._first_stop = 0, 0

    def mark(self, rows: Array, stops: Array | int) -> None:
        """Rows [N] are written up to `stops`."""
        self._update_stops(int(rows.max(initial=-1)) + 1)
        self._stops[rows] = np.maximum(self._stops[rows], stops)

    def mark_first(self, count: int, stop: int) -> None:
        """The first `count` rows are written up to `stop`: most forwards, so it costs no array operation."""
        if count != self._num_first:
            self._update_stops(count)
            self._num_first = count
        self._first_stop = max(self._first_stop, stop)

    def clear(self, blocks: Iterable[Tensor], rows: Array, starts: Array) -> None:
        """Zero the slots of rows [N] from `starts` [N] on in blocks [R, H, S, D], where they were written.

        The slots before `starts` count as written.
        """
        self._update_stops(int(rows.max(initial=-1)) + 1)
        dirty = self._stops[rows] > starts
        if dirty.any():
            groups = []
            for start in np.unique(starts[dirty]).tolist():
                group = rows[dirty & (starts == start)]
                groups.append((group, slice(start, int(self._stops[group].max()))))
            for block in blocks:
                for group, slots in groups:
                    present = torch.from_numpy(group[group < len(block)])
                    block[:, :, slots].index_fill_(0, present.to(block.device), 0)
        self._stops[rows] = starts

    def _update_stops(self, count: int) -> None:
        """Bring `_stops` up to date, for at least `count` rows."""
        missing = max(count, self._num_first) - len(self._stops)
        if missing > 0:
            self._stops = np.concatenate((self._stops, np.zeros(missing, dtype=np.int64)))
        if self._num_first:
            first = self._stops[: self._num_first]
            np.maximum(first, self._first_stop, out=first)
            self._num_first, self._first_stop = 0, 0
