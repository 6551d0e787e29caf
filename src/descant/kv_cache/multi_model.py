"""The caches of several models that are fed the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from descant.core.interfaces import RowCache

__all__ = ["MultiModelCache"]


class MultiModelCache:
    """A cache for each of several models, all of which follow the rows."""

    max_rewind: int | None

    def __init__(self, parts: Sequence[RowCache]) -> None:
        self.parts = tuple(parts)
        limits = [part.max_rewind for part in self.parts if part.max_rewind is not None]
        self.max_rewind = min(limits, default=None)
        self._lengths = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row holds [R] (host), in every part."""
        return self._lengths

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        for part in self.parts:
            part.extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self._lengths = lengths
        for part in self.parts:
            part.commit(parents, lengths)
