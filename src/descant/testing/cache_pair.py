"""A cache and the lists that it must equal, and what is promised of the cache beyond that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from descant.core.interfaces import KeyCache
from descant.testing.reference_cache import Keeps, ListCache

__all__ = ["OWN", "Pair", "Traits"]

OWN = "own"
_NEVER = 10**9


@dataclass(frozen=True)
class Traits:
    """What a cache promises, and may be asked for, beyond the port.

    `keeps` is what it shows of a row that it forgets parts of; "own" where it decides that by itself, by
    what is looked at. `error` is how far a number may be off that it was given, all of which are from -4
    to 4.
    """

    keeps: Keeps | str | None = None
    error: float = 0.0
    capacity: int | None = None  # how many positions a row may have
    frees: bool = False  # without rows it takes no more than a new one
    # By layer: heads, and the sizes of a key and of a value.
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 4), (1, 4, 2))


class Pair:
    """A cache and the lists that it must equal."""

    def __init__(self, cache: KeyCache, lists: ListCache, layers: int, highest: Sequence[int] = ()) -> None:
        self.cache, self.lists = cache, lists
        self.highest = list(highest)  # [R] the longest length that each row ever had
        self.written = [[length] * layers for length in self.lengths]  # [R][layer]
        self.sure = [0] * len(self.written)  # [R] what was told to be committed
        # [R] from where on a row was last written in its first layer alone: nobody commits that.
        self.partly = [_NEVER] * len(self.written)
        self._layers = layers

    @property
    def lengths(self) -> list[int]:
        """How many positions each row has [R]."""
        found: list[int] = self.lists.lengths.tolist()
        return found

    @property
    def ahead(self) -> bool:
        """Whether anything is written that is not committed."""
        return any(max(of) > length for of, length in zip(self.written, self.lengths, strict=True))

    def whole(self, row: int) -> None:
        """A row was written in all layers from where it was in one."""
        self.partly[row] = _NEVER

    def extend(self, rows: int) -> None:
        """Append empty rows to both."""
        for one in (self.cache, self.lists):
            one.extend(rows)
        self.highest += [0] * rows
        self.written += [[0] * self._layers for _ in range(rows)]
        self.sure += [0] * rows
        self.partly += [_NEVER] * rows

    def commit(self, parents: Sequence[int] | None, lengths: Sequence[int]) -> None:
        """Commit in both."""
        for one in (self.cache, self.lists):
            whence = None if parents is None else torch.tensor(parents, dtype=torch.long)
            one.commit(whence, torch.tensor(lengths, dtype=torch.long))
        if parents is not None:
            self.highest = [self.highest[row] for row in parents]
        self.highest = [max(pair) for pair in zip(self.highest, lengths, strict=True)]
        self.written = [[length] * self._layers for length in lengths]
        self.sure = [0] * len(lengths)
        self.partly = [_NEVER] * len(lengths)
