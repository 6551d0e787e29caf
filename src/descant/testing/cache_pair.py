"""A cache with its reference, and the traits of the cache."""

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
    """Traits of a cache that `check_cache` must know.

    `retention` gives the visible positions of an evicting cache; "own" if the cache decides by attention.
    `error` is the maximum error of a stored value, where all values are between -4 and 4.
    """

    retention: Retention | str | None = None
    error: float = 0.0
    capacity: int | None = None  # maximum positions per row
    frees_memory: bool = False  # without rows it is as small as a new cache
    # Per layer: heads, key size, value size.
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 4), (1, 4, 2))


class CachePair:
    """A cache and the reference that it must equal."""

    def __init__(
        self, cache: KVCache, reference: ReferenceCache, layers: int, max_lengths: Sequence[int] = ()
    ) -> None:
        self.cache, self.reference = cache, reference
        self.max_lengths = list(max_lengths)  # [R] the longest length that each row ever had
        self.written_lengths = [[length] * layers for length in self.lengths]  # [R][layer]
        self.promised_lengths = [0] * len(self.written_lengths)  # [R] what was told to be committed
        # [R] first position written only in the first layer: never committed.
        self.partial_from = [_NEVER] * len(self.written_lengths)
        self._num_layers = layers

    @property
    def lengths(self) -> list[int]:
        """Committed lengths [R]."""
        lengths: list[int] = self.reference.lengths.tolist()
        return lengths

    @property
    def has_uncommitted(self) -> bool:
        """Whether there are uncommitted writes."""
        return any(
            max(layer_lengths) > length
            for layer_lengths, length in zip(self.written_lengths, self.lengths, strict=True)
        )

    def clear_partial(self, row: int) -> None:
        """Note that a partly written row was written in all layers."""
        self.partial_from[row] = _NEVER

    def extend(self, rows: int) -> None:
        """Append empty rows to both."""
        for cache in (self.cache, self.reference):
            cache.extend(rows)
        self.max_lengths += [0] * rows
        self.written_lengths += [[0] * self._num_layers for _ in range(rows)]
        self.promised_lengths += [0] * rows
        self.partial_from += [_NEVER] * rows

    def commit(self, parents: Sequence[int] | None, lengths: Sequence[int]) -> None:
        """Commit in both."""
        for cache in (self.cache, self.reference):
            parent_index = None if parents is None else torch.tensor(parents, dtype=torch.long)
            cache.commit(parent_index, torch.tensor(lengths, dtype=torch.long))
        if parents is not None:
            self.max_lengths = [self.max_lengths[row] for row in parents]
        self.max_lengths = [max(pair) for pair in zip(self.max_lengths, lengths, strict=True)]
        self.written_lengths = [[length] * self._num_layers for length in lengths]
        self.promised_lengths = [0] * len(lengths)
        self.partial_from = [_NEVER] * len(lengths)
