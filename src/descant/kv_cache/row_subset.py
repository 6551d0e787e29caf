"""A view of some rows of a cache, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, MultiCache, RowCache, StateCache, VisibleSlots
from descant.kv_cache.cached_row import unwrap_cache

__all__ = ["RowSubset", "row_subset"]


def row_subset(cache: RowCache, row_index: Tensor) -> RowCache:
    """A view whose row `i` is row `row_index[i]` (host) of `cache`; `cache` itself for all rows in order."""
    cache, row_index = unwrap_cache(cache, row_index)
    if len(row_index) == len(cache) and torch.equal(row_index, torch.arange(len(row_index))):
        return cache
    return RowSubset(cache, row_index)


class RowSubset:
    """A cache for one forward that feeds only some rows, or all rows in another order.

    Reads and writes go to the underlying cache. Rows are moved only there.
    """

    def __init__(self, cache: RowCache, row_index: Tensor) -> None:
        self._cache = cache
        self._row_index = row_index  # [N] (host)
        self._last_span: tuple[KVSpan, KVSpan] | None = None  # the last span, as given and as mapped

    @property
    def max_rewind(self) -> int | None:
        """How many positions a row may be cut by."""
        return self._cache.max_rewind

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have."""
        return self._cache.capacity

    def __len__(self) -> int:
        return len(self._row_index)

    @cached_property
    def parts(self) -> Sequence[RowCache]:
        """The same view of each part of a `MultiModelCache`."""
        return [row_subset(part, self._row_index) for part in cast(MultiCache, self._cache).parts]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> NoReturn:  # noqa: ARG002 - the interface
        """Not supported: rows move only in the underlying cache."""
        raise TypeError("RowSubset does not support commit: commit the underlying cache")

    def extend(self, rows: int) -> NoReturn:  # noqa: ARG002 - the interface
        """Not supported: rows are added only to the underlying cache."""
        raise TypeError("RowSubset does not support extend: extend the underlying cache")

    # -------------------------------------------------------------------- keys and values
    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the keys and values [N, H, S, D] of its rows."""
        return cast(KVCache, self._cache).update(layer, key, value, self._map_span(span))

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will return for this layer."""
        return cast(KVCache, self._cache).visible_slots(layer, self._map_span(span))

    def _map_span(self, span: KVSpan) -> KVSpan:
        """The span in rows of the underlying cache; one object for all layers, because caches key on it."""
        if self._last_span is None or self._last_span[0] is not span:
            row_index = self._row_index[span.on_host(len(self))[0]]
            rows = row_index if span.rows is None else row_index.to(span.rows.device, non_blocking=True)
            self._last_span = span, span._replace(rows=rows, host_rows=row_index)
        return self._last_span[1]

    # -------------------------------------------------------------------- state
    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """The rows that have a state (host), in as few batches as can share a forward."""
        subset_row = torch.full((len(self._cache),), -1)
        subset_row[self._row_index] = torch.arange(len(self._row_index))
        fed_lengths = None
        if lengths is not None:
            fed_lengths = torch.full((len(self._cache),), -1)
            fed_lengths[self._row_index] = lengths
        batches = [subset_row[batch] for batch in cast(StateCache, self._cache).row_batches(fed_lengths)]
        return [batch[batch >= 0].sort().values for batch in batches if bool((batch >= 0).any())]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), in that order; it must not be written to."""
        return cast(StateCache, self._cache).read_state(self._row_index[rows])

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Store the state of those rows (host) after a forward."""
        cast(StateCache, self._cache).write_state(self._row_index[rows], state, lengths)
