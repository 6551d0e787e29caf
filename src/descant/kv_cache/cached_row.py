"""What is known of a text before it is read: a row of keys and values in some cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan, RowCache

__all__ = [
    "CachedRow",
    "append_rows",
    "copy_rows",
    "gather_rows",
    "is_lossless",
    "layer_indices",
    "read_layers",
    "unwrap_cache",
]


class CachedRow(NamedTuple):
    """One row of a cache, which stays as it is."""

    store: KVCache
    row: int = 0

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return int(self.store.lengths[self.row])


def append_rows(cache: RowCache, pasts: Sequence[CachedRow | None]) -> None:
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
        rows = torch.tensor([cast(CachedRow, pasts[place]).row for place in places])
        if type(store) is type(cache):
            cache.join(store.select(rows))
        else:
            first = len(cache)
            cache.extend(len(places))
            whole, place = unwrap_cache(cache, torch.arange(first, len(cache)))
            copy_rows(whole, place, store, rows)


def copy_rows(cache: KVCache, place: Tensor, store: KVCache, rows: Tensor) -> None:
    """Write what rows of one cache hold to empty rows of another, of any kind; a commit has to follow."""
    size = int(store.lengths[rows].max())
    span: dict[torch.device, KVSpan] = {}
    for layer, (key, value) in read_layers(store, rows).items():
        if key.device not in span:
            span[key.device] = KVSpan(place.to(key.device), 0, size, size)
        cache.update(layer, key[:, :, :size], value[:, :, :size], span[key.device])


def unwrap_cache(cache: RowCache, rows: Tensor) -> tuple[KVCache, Tensor]:
    """The cache that is written to and where those rows lie in it: rows may have twins beside them."""
    while (inner := getattr(cache, "inner", None)) is not None:
        rows, cache = cast(Any, cache).row_index[rows], inner
    return cast(KVCache, cache), rows


def is_lossless(store: object) -> bool:
    """Whether what a cache holds can be read position by position, just as it was written."""
    return (
        hasattr(store, "read")
        and getattr(store, "max_rewind", 0) is None
        and getattr(store, "lossless", True)
    )


def layer_indices(store: KVCache) -> Sequence[int]:
    """The layers that a cache holds anything of."""
    return sorted(cast(Any, store).layers)


def read_layers(store: KVCache, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """The keys and values [N, H, S, D] that rows hold of each layer, position by position."""
    return {layer: cast(Any, store).read(layer, rows) for layer in layer_indices(store)}


def gather_rows(pasts: Sequence[CachedRow]) -> KVCache:
    """One cache with a row for each past, in that order; one that has just these is taken as it is."""
    first = pasts[0].store
    if all(past.store is first for past in pasts):
        rows = [past.row for past in pasts]
        return first if rows == list(range(len(first))) else first.select(torch.tensor(rows))
    whole = first.select(torch.zeros(0, dtype=torch.long))
    append_rows(whole, pasts)
    return whole
