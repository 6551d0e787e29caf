"""A cache and the lists that it must equal, and what is promised of the cache beyond that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from descant.core.interfaces import KVCache
from descant.testing.reference_cache import ReferenceCache, Retention

__all__ = ["CACHE_DECIDES", "CachePair", "CacheTraits"]

CACHE_DECIDES = "own"
_NEVER = 10**9


@dataclass(frozen=True)
class CacheTraits:
    """What a cache promises, and may be asked for, beyond the port.

    `keeps` is what it shows of a row that it forgets parts of; "own" where it decides that by itself, by
    what is looked at. `error` is how far a number may be off that it was given, all of which are from -4
    to 4.
    """

    retention: Retention | str | None = None
    error: float = 0.0
    capacity: int | None = None  # how many positions a row may have
    frees_memory: bool = False  # without rows it takes no more than a new one
    # By layer: heads, and the sizes of a key and of a value.
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 4), (1, 4, 2))


class CachePair:
    """A cache and the lists that it must equal."""

    def __init__(
        self, cache: KVCache, lists: ReferenceCache, layers: int, highest: Sequence[int] = ()
    ) -> None:
        self.cache, self.reference = cache, lists
        self.max_lengths = list(highest)  # [R] the longest length that each row ever had
        self.written_lengths = [[length] * layers for length in self.lengths]  # [R][layer]
        self.promised_lengths = [0] * len(self.written_lengths)  # [R] what was told to be committed
        # [R] from where on a row was last written in its first layer alone: nobody commits that.
        self.partial_from = [_NEVER] * len(self.written_lengths)
        self._num_layers = layers

    @property
    def lengths(self) -> list[int]:
        """How many positions each row has [R]."""
        found: list[int] = self.reference.lengths.tolist()
        return found

    @property
    def has_uncommitted(self) -> bool:
        """Whether anything is written that is not committed."""
        return any(max(of) > length for of, length in zip(self.written_lengths, self.lengths, strict=True))

    def clear_partial(self, row: int) -> None:
        """A row was written in all layers from where it was in one."""
        self.partial_from[row] = _NEVER

    def extend(self, rows: int) -> None:
        """Append empty rows to both."""
        for one in (self.cache, self.reference):
            one.extend(rows)
        self.max_lengths += [0] * rows
        self.written_lengths += [[0] * self._num_layers for _ in range(rows)]
        self.promised_lengths += [0] * rows
        self.partial_from += [_NEVER] * rows

    def commit(self, parents: Sequence[int] | None, lengths: Sequence[int]) -> None:
        """Commit in both."""
        for one in (self.cache, self.reference):
            whence = None if parents is None else torch.tensor(parents, dtype=torch.long)
            one.commit(whence, torch.tensor(lengths, dtype=torch.long))
        if parents is not None:
            self.max_lengths = [self.max_lengths[row] for row in parents]
        self.max_lengths = [max(pair) for pair in zip(self.max_lengths, lengths, strict=True)]
        self.written_lengths = [[length] * self._num_layers for length in lengths]
        self.promised_lengths = [0] * len(lengths)
        self.partial_from = [_NEVER] * len(lengths)
