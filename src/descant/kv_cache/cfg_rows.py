"""A cache in which rows can have twins that go wherever they go."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.rows import stable_row_order

__all__ = ["PairedRowCache"]


class PairedRowCache:
    """Rows and twins side by side in one cache, so that one forward can read both.

    Row `i` lies in row `place[i]` of the cache inside, its twin in `twin[i]`; a twin is always `shift[i]`
    positions longer than its row (or shorter), once both hold anything.
    """

    def __init__(self, inner: RowCache) -> None:
        self.inner = inner
        count = len(inner)
        self.row_index = torch.arange(count)  # [R] (host)
        self.uncond_row = torch.full((count,), -1)  # [R] -1 where a row has none
        self.uncond_offset = torch.zeros(count, dtype=torch.long)  # [R]
        self._num_inner_rows = count  # rows inside

    @property
    def max_rewind(self) -> int | None:
        """How far rows may be cut."""
        return self.inner.max_rewind

    def __len__(self) -> int:
        return len(self.row_index)

    @property
    def outer_row(self) -> Tensor:
        """The row that each row inside is [N]; -1 where it is a twin."""
        whose = torch.full((self._num_inner_rows,), -1)
        whose[self.row_index] = torch.arange(len(self.row_index))
        return whose

    def inner_order(self, mine: Tensor) -> Tensor | None:
        """Which of `[rows; twins of mine]` lies in each row inside [N]; None: they lie like that."""
        lies = torch.cat((self.row_index, self.uncond_row[mine]))
        if torch.equal(lies, torch.arange(len(lies))):
            return None
        order = torch.empty_like(lies)
        order[lies] = torch.arange(len(lies))
        return order

    def extend(self, rows: int) -> None:
        """Append empty rows, without twins."""
        self.inner.extend(rows)
        self.row_index = torch.cat((self.row_index, self._num_inner_rows + torch.arange(rows)))
        self.uncond_row = torch.cat((self.uncond_row, torch.full((rows,), -1)))
        self.uncond_offset = torch.cat((self.uncond_offset, torch.zeros(rows, dtype=torch.long)))
        self._num_inner_rows += rows

    def add_uncond_rows(self, rows: Tensor, shifts: Tensor) -> None:
        """Give rows that hold nothing yet twins that hold nothing yet."""
        self.inner.extend(len(rows))
        self.uncond_row[rows] = self._num_inner_rows + torch.arange(len(rows))
        self.uncond_offset[rows] = shifts
        self._num_inner_rows += len(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and so is its twin."""
        if parents is not None:
            self.row_index, self.uncond_row, self.uncond_offset = (
                self.row_index[parents],
                self.uncond_row[parents],
                self.uncond_offset[parents],
            )
        has = (self.uncond_row >= 0).nonzero().squeeze(1)
        whence = torch.cat((self.row_index, self.uncond_row[has]))
        held = torch.cat((lengths, torch.where(lengths[has] > 0, lengths[has] + self.uncond_offset[has], 0)))
        if parents is None:
            inside = torch.empty_like(held)
            inside[whence] = held
            self.inner.commit(None, inside)
            return
        order = stable_row_order(whence, self._num_inner_rows)
        order = torch.arange(len(whence)) if order is None else order
        self.inner.commit(whence[order], held[order])
        lies = torch.empty_like(order)
        lies[order] = torch.arange(len(order))
        self.row_index = lies[: len(parents)]
        self.uncond_row = torch.full((len(parents),), -1)
        self.uncond_row[has] = lies[len(parents) :]
        self._num_inner_rows = len(order)
