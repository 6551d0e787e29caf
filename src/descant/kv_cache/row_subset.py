"""Some rows of a cache, in an order of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, RowCache, StateCache, VisibleSlots

__all__ = ["RowSubset", "row_subset"]


def row_subset(cache: RowCache, place: Tensor) -> RowCache:
    """A cache whose row `i` is row `place[i]` (host) of the given one, which it is if they lie like that."""
    # Where rows have twins beside them, the cache inside is the one that is written.
    while (inner := getattr(cache, "inner", None)) is not None:
        place, cache = cast(Any, cache).row_index[place], inner
    if len(place) == len(cache) and torch.equal(place, torch.arange(len(place))):
        return cache
    return RowSubset(cache, place)


class RowSubset:
    """A cache as a model sees it that is fed only some of its rows, or all of them in another order.

    It reads and writes what the whole holds, for the time of one forward; rows are moved in the whole.
    """

    def __init__(self, whole: RowCache, place: Tensor) -> None:
        self._cache = whole
        self._row_index = place  # [N] (host)
        self._last_span: tuple[KVSpan, KVSpan] | None = None  # the last one, as given and as the whole has it

    @property
    def max_rewind(self) -> int | None:
        """How far rows may be cut."""
        return self._cache.max_rewind

    def __len__(self) -> int:
        return len(self._row_index)

    @cached_property
    def parts(self) -> Sequence[RowCache]:
        """The same of each part, where the whole is the caches of several models."""
        return [row_subset(part, self._row_index) for part in cast(Any, self._cache).parts]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> NoReturn:  # noqa: ARG002 - the port
        """Not here: the rows of a portion lie between others."""
        raise TypeError("rows of a portion move with the whole: commit there")

    def extend(self, rows: int) -> NoReturn:  # noqa: ARG002 - the port
        """Not here: the rows of a portion lie between others."""
        raise TypeError("rows of a portion are some of the whole: extend that")

    # -------------------------------------------------------------------- keys and values
    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; the keys and values [N, H, S, D] that its rows hold then."""
        return cast(KVCache, self._cache).update(layer, key, value, self._map_span(span))

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """What `update` is about to show of that layer."""
        return cast(KVCache, self._cache).visible_slots(layer, self._map_span(span))

    def _map_span(self, span: KVSpan) -> KVSpan:
        """A span as the whole has it: one for all layers, for a cache may look up once what it comes to."""
        if self._last_span is None or self._last_span[0] is not span:
            whence = span.on_host(len(self))[0]
            places = self._row_index[whence]
            rows = places if span.rows is None else places.to(span.rows.device, non_blocking=True)
            self._last_span = span, span._replace(rows=rows, host_rows=places)
        return self._last_span[1]

    # -------------------------------------------------------------------- state
    def row_batches(self) -> list[Tensor]:
        """The rows that have a state, in as few parts as can share a forward (host)."""
        whose = torch.full((len(self._cache),), -1)
        whose[self._row_index] = torch.arange(len(self._row_index))
        mine = [whose[part] for part in cast(StateCache, self._cache).row_batches()]
        return [part[part >= 0].sort().values for part in mine if bool((part >= 0).any())]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), a line each, in that order; it may be written to."""
        return cast(StateCache, self._cache).read_state(self._row_index[rows])

    def write_state(self, rows: Tensor, state: Any) -> None:
        """Hold the state of those rows (host) after a forward."""
        cast(StateCache, self._cache).write_state(self._row_index[rows], state)
