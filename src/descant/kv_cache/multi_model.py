"""The caches of several models that decode the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from descant.core.interfaces import RowCache, TransactionalCache

__all__ = ["MultiModelCache"]


class MultiModelCache:
    """One cache per model; every row operation is applied to all of them."""

    max_rewind: int | None
    capacity: int | None = None

    def __init__(self, parts: Sequence[RowCache]) -> None:
        self.parts = tuple(parts)
        limits = [part.max_rewind for part in self.parts if part.max_rewind is not None]
        self.max_rewind = min(limits, default=None)
        self._lengths = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), equal in all parts."""
        return self._lengths

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        for part in self.parts:
            part.extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.prepare_commit(parents, lengths)()

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit of all parts, prepared by those that can."""
        prepared = [
            part.prepare_commit(parents, lengths)
            for part in self.parts
            if isinstance(part, TransactionalCache)
        ]
        others = [part for part in self.parts if not isinstance(part, TransactionalCache)]

        def commit() -> None:
            for part in others:  # first, as only these may fail
                part.commit(parents, lengths)
            for commit_part in prepared:
                commit_part()
            self._lengths = lengths

        return commit
