"""A cache with conditional and unconditional rows for classifier-free guidance."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from descant.core.interfaces import DraftLimitingCache, RowCache, SelectableCache
from descant.core.rows import stable_row_order

__all__ = ["PairedRowCache"]

_NO_LIMIT = 2**31


class PairedRowCache:
    """Conditional rows and their unconditional rows in one inner cache, so that one forward feeds both.

    Row `i` is inner row `row_index[i]`, its unconditional row is inner row `uncond_row[i]`, which was added
    when the row had `uncond_base[i]` positions. Once both are fed, the unconditional row is
    `uncond_offset[i]` positions longer (or shorter) than its row.
    """

    def __init__(self, inner: RowCache) -> None:
        self.inner = inner
        count = len(inner)
        self.row_index = torch.arange(count)  # [R] (host)
        self.uncond_row = torch.full((count,), -1)  # [R] -1: no unconditional row
        self.uncond_offset = torch.zeros(count, dtype=torch.long)  # [R]
        self.uncond_base = torch.zeros(count, dtype=torch.long)  # [R]
        self._num_inner_rows = count

    @property
    def max_rewind(self) -> int | None:
        """How many positions a row may be cut by."""
        return self.inner.max_rewind

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have."""
        return self.inner.capacity

    def max_drafts(self, rows: Tensor, pending: Tensor) -> Tensor:
        """The most drafts of these rows [N] (host), as their unconditional rows allow it too."""
        inner = self.inner
        if not isinstance(inner, DraftLimitingCache):
            return torch.full_like(pending, _NO_LIMIT)
        limit, uncond_row = inner.max_drafts(self.row_index[rows], pending), self.uncond_row[rows]
        paired = (uncond_row >= 0).nonzero().squeeze(1)
        limit[paired] = limit[paired].minimum(inner.max_drafts(uncond_row[paired], pending[paired]))
        return limit

    def __len__(self) -> int:
        return len(self.row_index)

    @property
    def outer_row(self) -> Tensor:
        """The row of each inner row [N]; -1 for unconditional rows."""
        outer_row = torch.full((self._num_inner_rows,), -1)
        outer_row[self.row_index] = torch.arange(len(self.row_index))
        return outer_row

    def inner_order(self, guided: Tensor) -> Tensor | None:
        """For each inner row its index in `[rows; unconditional rows of guided]` [N]; None: the identity."""
        inner_rows = torch.cat((self.row_index, self.uncond_row[guided]))
        if torch.equal(inner_rows, torch.arange(len(inner_rows))):
            return None
        order = torch.empty_like(inner_rows)
        order[inner_rows] = torch.arange(len(inner_rows))
        return order

    def extend(self, rows: int) -> None:
        """Append empty rows without unconditional rows."""
        self.inner.extend(rows)
        self._append(rows)

    def select(self, rows: Tensor) -> PairedRowCache:
        """A new cache with these rows [N] (host) and their unconditional rows; this one is unchanged."""
        paired = (self.uncond_row[rows] >= 0).nonzero().squeeze(1)
        inner_rows = torch.cat((self.row_index[rows], self.uncond_row[rows][paired]))
        other = PairedRowCache(cast(SelectableCache, self.inner).select(inner_rows))
        other.row_index, other.uncond_row = torch.arange(len(rows)), torch.full((len(rows),), -1)
        other.uncond_row[paired] = len(rows) + torch.arange(len(paired))
        other.uncond_offset, other.uncond_base = self.uncond_offset[rows], self.uncond_base[rows]
        return other

    def join(self, other: RowCache) -> None:
        """Append the rows of another cache, of this type or that of the inner cache, which is emptied."""
        first, first_inner, inner = len(self), self._num_inner_rows, cast(SelectableCache, self.inner)
        added = other if isinstance(other, PairedRowCache) else PairedRowCache(other)
        inner.join(cast(SelectableCache, added.inner))
        self._append(len(added))
        self.row_index[first:] = added.row_index + first_inner
        self.uncond_row[first:] = torch.where(added.uncond_row < 0, -1, added.uncond_row + first_inner)
        self.uncond_offset[first:], self.uncond_base[first:] = added.uncond_offset, added.uncond_base
        self._num_inner_rows = first_inner + added._num_inner_rows

    def _append(self, rows: int) -> None:
        """Count new rows, which have been appended to the inner cache."""
        self.row_index = torch.cat((self.row_index, self._num_inner_rows + torch.arange(rows)))
        self.uncond_row = torch.cat((self.uncond_row, torch.full((rows,), -1)))
        self.uncond_offset = torch.cat((self.uncond_offset, torch.zeros(rows, dtype=torch.long)))
        self.uncond_base = torch.cat((self.uncond_base, torch.zeros(rows, dtype=torch.long)))
        self._num_inner_rows += rows

    def add_uncond_rows(self, rows: Tensor, offsets: Tensor, lengths: Tensor | None = None) -> None:
        """Append an empty unconditional row for each of these rows, which have `lengths` [N] positions."""
        self.inner.extend(len(rows))
        self.uncond_row[rows] = self._num_inner_rows + torch.arange(len(rows))
        self.uncond_offset[rows] = offsets
        self.uncond_base[rows] = torch.zeros_like(rows) if lengths is None else lengths
        self._num_inner_rows += len(rows)

    def uncond_lengths(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The positions [N] of the unconditional rows of rows with `lengths` [N]; 0 before they are fed."""
        return torch.where(lengths > self.uncond_base[rows], lengths + self.uncond_offset[rows], 0)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; its unconditional row is cut alike."""
        parent_rows = torch.arange(len(self)) if parents is None else parents
        row_index, uncond_row = self.row_index[parent_rows], self.uncond_row[parent_rows]
        guided = (uncond_row >= 0).nonzero().squeeze(1)
        uncond_lengths = self.uncond_lengths(parent_rows[guided], lengths[guided])
        inner_parents = torch.cat((row_index, uncond_row[guided]))
        inner_lengths = torch.cat((lengths, uncond_lengths))
        if parents is None:
            lengths_by_row = torch.empty_like(inner_lengths)
            lengths_by_row[inner_parents] = inner_lengths
            self.inner.commit(None, lengths_by_row)
            return
        order = stable_row_order(inner_parents, self._num_inner_rows)
        order = torch.arange(len(inner_parents)) if order is None else order
        new_index = torch.empty_like(order)
        new_index[order] = torch.arange(len(order))
        new_uncond_row = torch.full((len(parents),), -1)
        new_uncond_row[guided] = new_index[len(parents) :]
        offset, base = self.uncond_offset[parents], self.uncond_base[parents]
        self.inner.commit(inner_parents[order], inner_lengths[order])
        self.row_index, self.uncond_row = new_index[: len(parents)], new_uncond_row
        self.uncond_offset, self.uncond_base = offset, base
        self._num_inner_rows = len(order)
