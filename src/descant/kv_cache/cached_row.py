"""What is known of a text before it is read: a row of keys and values in some cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from descant.core.interfaces import Cache, KeyCache, Span

__all__ = ["Past", "contents", "gathered", "inside", "layers_of", "poured", "readable", "seat"]


class Past(NamedTuple):
    """One row of a cache, which stays as it is."""

    store: KeyCache
    row: int = 0

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return int(self.store.lengths[self.row])


def seat(cache: Cache, pasts: Sequence[Past | None]) -> None:
    """Append a row for each to a cache, with what its past holds; empty where there is none.

    A past of another kind of cache is written anew, one of the same kind joins as it is, so that what
    its rows share stays shared.
    """
    stores = [None if past is None else past.store for past in pasts]
    for _, some in groupby(range(len(pasts)), lambda place: id(stores[place])):
        places = list(some)
        store = stores[places[0]]
        if store is None:
            cache.extend(len(places))
            continue
        rows = torch.tensor([cast(Past, pasts[place]).row for place in places])
        if type(store) is type(cache):
            cache.join(store.select(rows))
        else:
            first = len(cache)
            cache.extend(len(places))
            whole, place = inside(cache, torch.arange(first, len(cache)))
            poured(whole, place, store, rows)


def poured(cache: KeyCache, place: Tensor, store: KeyCache, rows: Tensor) -> None:
    """Write what rows of one cache hold to empty rows of another, of any kind; a commit has to follow."""
    size = int(store.lengths[rows].max())
    span: dict[torch.device, Span] = {}
    for layer, (key, value) in contents(store, rows).items():
        if key.device not in span:
            span[key.device] = Span(place.to(key.device), 0, size, size)
        cache.update(layer, key[:, :, :size], value[:, :, :size], span[key.device])


def inside(cache: Cache, rows: Tensor) -> tuple[KeyCache, Tensor]:
    """The cache that is written to and where those rows lie in it: rows may have twins beside them."""
    while (inner := getattr(cache, "inner", None)) is not None:
        rows, cache = cast(Any, cache).place[rows], inner
    return cast(KeyCache, cache), rows


def readable(store: object) -> bool:
    """Whether what a cache holds can be read position by position, just as it was written."""
    return hasattr(store, "read") and getattr(store, "rewind", 0) is None and getattr(store, "lossless", True)


def layers_of(store: KeyCache) -> Sequence[int]:
    """The layers that a cache holds anything of."""
    return sorted(cast(Any, store).layers)


def contents(store: KeyCache, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """The keys and values [N, H, S, D] that rows hold of each layer, position by position."""
    return {layer: cast(Any, store).read(layer, rows) for layer in layers_of(store)}


def gathered(pasts: Sequence[Past]) -> KeyCache:
    """One cache with a row for each past, in that order; one that has just these is taken as it is."""
    first = pasts[0].store
    if all(past.store is first for past in pasts):
        rows = [past.row for past in pasts]
        return first if rows == list(range(len(first))) else first.select(torch.tensor(rows))
    whole = first.select(torch.zeros(0, dtype=torch.long))
    seat(whole, pasts)
    return whole
