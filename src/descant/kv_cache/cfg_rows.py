"""A cache in which rows can have twins that go wherever they go."""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.interfaces import Cache
from descant.core.rows import settle

__all__ = ["Twins"]


class Twins:
    """Rows and twins side by side in one cache, so that one forward can read both.

    Row `i` lies in row `place[i]` of the cache inside, its twin in `twin[i]`; a twin is always `shift[i]`
    positions longer than its row (or shorter), once both hold anything.
    """

    def __init__(self, inner: Cache) -> None:
        self.inner = inner
        count = len(inner)
        self.place = torch.arange(count)  # [R] (host)
        self.twin = torch.full((count,), -1)  # [R] -1 where a row has none
        self.shift = torch.zeros(count, dtype=torch.long)  # [R]
        self._count = count  # rows inside

    @property
    def rewind(self) -> int | None:
        """How far rows may be cut."""
        return self.inner.rewind

    def __len__(self) -> int:
        return len(self.place)

    @property
    def whose(self) -> Tensor:
        """The row that each row inside is [N]; -1 where it is a twin."""
        whose = torch.full((self._count,), -1)
        whose[self.place] = torch.arange(len(self.place))
        return whose

    def order(self, mine: Tensor) -> Tensor | None:
        """Which of `[rows; twins of mine]` lies in each row inside [N]; None: they lie like that."""
        lies = torch.cat((self.place, self.twin[mine]))
        if torch.equal(lies, torch.arange(len(lies))):
            return None
        order = torch.empty_like(lies)
        order[lies] = torch.arange(len(lies))
        return order

    def extend(self, rows: int) -> None:
        """Append empty rows, without twins."""
        self.inner.extend(rows)
        self.place = torch.cat((self.place, self._count + torch.arange(rows)))
        self.twin = torch.cat((self.twin, torch.full((rows,), -1)))
        self.shift = torch.cat((self.shift, torch.zeros(rows, dtype=torch.long)))
        self._count += rows

    def seat(self, rows: Tensor, shifts: Tensor) -> None:
        """Give rows that hold nothing yet twins that hold nothing yet."""
        self.inner.extend(len(rows))
        self.twin[rows] = self._count + torch.arange(len(rows))
        self.shift[rows] = shifts
        self._count += len(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and so is its twin."""
        if parents is not None:
            self.place, self.twin, self.shift = self.place[parents], self.twin[parents], self.shift[parents]
        has = (self.twin >= 0).nonzero().squeeze(1)
        whence = torch.cat((self.place, self.twin[has]))
        held = torch.cat((lengths, torch.where(lengths[has] > 0, lengths[has] + self.shift[has], 0)))
        if parents is None:
            inside = torch.empty_like(held)
            inside[whence] = held
            self.inner.commit(None, inside)
            return
        order = settle(whence, self._count)
        order = torch.arange(len(whence)) if order is None else order
        self.inner.commit(whence[order], held[order])
        lies = torch.empty_like(order)
        lies[order] = torch.arange(len(order))
        self.place = lies[: len(parents)]
        self.twin = torch.full((len(parents),), -1)
        self.twin[has] = lies[len(parents) :]
        self._count = len(order)
