"""Groups of rows that share a prefix after forks, and the length of that prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["PrefixGroups", "SlotCopies", "SlotCopy", "WrittenSlots"]


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


class SlotCopy(NamedTuple):
    """Slots of some rows of a tensor, and the place in a block that they are copied to."""

    source: Tensor  # [R, H, S, D], or a view of the block
    rows: Tensor  # [N] rows of the source, on its device
    target: Tensor  # a view of slots of the block [R', H, K, D]
    target_rows: Tensor  # [N]
    slots: Tensor | None = None  # [N, H or 1, K] the slots of each head; None: the first ones


class SlotCopies:
    """Copies in several blocks, for which all memory is allocated before the first one is made.

    A copy that runs out of memory half-way would leave some layers copied and others not. Buffers are shared
    by all blocks of one shape.
    """

    def __init__(self) -> None:
        self.num_slots = 0  # slots that are copied in each block, counted by the owner
        self._by_block: list[list[tuple[SlotCopy, list[Tensor] | None, Tensor]]] = []
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        # With the index on the host, so that its id stays its own.
        self._sent: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def send(self, index: Tensor, device: torch.device) -> Tensor:
        """An index of copies (host) on a device, sent once for all blocks there."""
        key = id(index), device
        if key not in self._sent:
            self._sent[key] = index, index.to(device, non_blocking=True)
        return self._sent[key][1]

    def add(self, copies: Sequence[SlotCopy]) -> None:
        """Add the copies to one block; the source of one may be the target of another."""
        with_buffers = []
        for number, copy in enumerate(copies):
            shape = (len(copy.rows), *copy.target.shape[1:])
            key = (number, shape, copy.source.dtype, copy.source.device)
            if key not in self._buffers:
                self._buffers[key] = copy.source.new_empty(shape)
            index = None
            if copy.slots is not None:
                heads = torch.arange(copy.source.shape[1], device=copy.source.device)[:, None]
                index = [copy.rows[:, None, None], heads, copy.slots]
            with_buffers.append((copy, index, self._buffers[key]))
        self._by_block.append(with_buffers)

    def run(self) -> None:
        """Make the copies, without an allocation."""
        with torch.no_grad():
            for copies in self._by_block:
                for copy, index, buffer in copies:
                    if index is None:
                        torch.index_select(
                            copy.source.narrow(2, 0, buffer.shape[2]), 0, copy.rows, out=buffer
                        )
                    else:
                        torch.ops.aten.index(copy.source, index, out=buffer)
                for copy, _, buffer in copies:
                    copy.target.index_copy_(0, copy.target_rows, buffer)


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
