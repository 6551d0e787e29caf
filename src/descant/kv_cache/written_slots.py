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

    def mark(self, rows: Array, stops: Array | int) -> None:
        """Rows [N] are written up to `stops`."""
        self._grow(rows)
        self._stops[rows] = np.maximum(self._stops[rows], stops)

    def mark_first(self, count: int, stops: Array | int) -> None:
        """The first `count` rows are written up to `stops`: the common case, without an index."""
        if count > len(self._stops):
            self._stops = np.pad(self._stops, (0, count - len(self._stops)))
        first = self._stops[:count]
        np.maximum(first, stops, out=first)

    def clear(self, blocks: Iterable[Tensor], rows: Array, starts: Array) -> None:
        """Zero the slots of rows [N] from `starts` [N] on in blocks [R, H, S, D], where they were written."""
        self._grow(rows)
        dirty = self._stops[rows] > starts
        if not dirty.any():
            return
        groups = []
        for start in np.unique(starts[dirty]).tolist():
            group = rows[dirty & (starts == start)]
            groups.append((group, slice(start, int(self._stops[group].max()))))
        for block in blocks:
            for group, slots in groups:
                present = torch.from_numpy(group[group < len(block)])
                block[:, :, slots].index_fill_(0, present.to(block.device), 0)
        self._stops[rows] = np.minimum(self._stops[rows], starts)

    def _grow(self, rows: Array) -> None:
        missing = int(rows.max(initial=-1)) + 1 - len(self._stops)
        if missing > 0:
            self._stops = np.pad(self._stops, (0, missing))
