"""References to single cache rows, and copies of rows between caches of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from descant.core.interfaces import CacheWrapper, KVCache, KVSpan, ReadableCache, RowCache

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
    """One row of a cache; the cache must not change while the reference is in use."""

    store: KVCache
    row: int = 0

    @property
    def length(self) -> int:
        """The number of positions of the row."""
        return int(self.store.lengths[self.row])


def append_rows(cache: RowCache, cached_rows: Sequence[CachedRow | None]) -> None:
    """Append one row per entry to a cache, with the entry's content; None appends an empty row.

    Rows of the type of the cache, or of its inner cache, still share memory afterwards. Others are copied.
    """
    joinable = (type(cache), type(unwrap_cache(cache, torch.zeros(0, dtype=torch.long))[0]))
    stores = [None if cached is None else cached.store for cached in cached_rows]
    for _, group in groupby(range(len(cached_rows)), lambda index: id(stores[index])):
        indices = list(group)
        store = stores[indices[0]]
        if store is None:
            cache.extend(len(indices))
            continue
        rows = torch.tensor([cast(CachedRow, cached_rows[index]).row for index in indices])
        if type(store) in joinable and hasattr(cache, "join"):
            cache.join(store.select(rows))
        else:
            first = len(cache)
            cache.extend(len(indices))
            target, target_rows = unwrap_cache(cache, torch.arange(first, len(cache)))
            copy_rows(target, target_rows, store, rows)


def copy_rows(cache: KVCache, target_rows: Tensor, store: ReadableCache, rows: Tensor) -> None:
    """Copy rows of `store` to empty rows of `cache`, which may be of another type; call `commit` after."""
    size = int(store.lengths[rows].max())
    spans: dict[torch.device, KVSpan] = {}
    for layer, (key, value) in read_layers(store, rows).items():
        if key.device not in spans:
            spans[key.device] = KVSpan(target_rows.to(key.device), 0, size, size)
        cache.update(layer, key[:, :, :size], value[:, :, :size], spans[key.device])


def unwrap_cache(cache: RowCache, rows: Tensor) -> tuple[KVCache, Tensor]:
    """The innermost cache and the index of those rows in it; `PairedRowCache` stores rows elsewhere."""
    # Few caches have a `row_index`, and `isinstance` of a protocol is slow.
    while hasattr(cache, "row_index") and isinstance(cache, CacheWrapper):
        rows, cache = cache.row_index[rows], cache.inner
    return cast(KVCache, cache), rows


def is_lossless(store: object) -> bool:
    """Whether a cache returns every position exactly as it was written."""
    return isinstance(store, ReadableCache) and store.max_rewind is None and store.exact_reads


def layer_indices(store: ReadableCache) -> Sequence[int]:
    """The layers that were written to a cache."""
    return sorted(store.layers)


def read_layers(store: ReadableCache, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer the keys and values [N, H, S, D] of rows, in order of position."""
    return {layer: store.read(layer, rows) for layer in layer_indices(store)}


def gather_rows(cached_rows: Sequence[CachedRow]) -> KVCache:
    """A cache with these rows in this order; their own cache where it has exactly these rows."""
    first = cached_rows[0].store
    if all(cached.store is first for cached in cached_rows):
        rows = [cached.row for cached in cached_rows]
        return first if rows == list(range(len(first))) else first.select(torch.tensor(rows))
    gathered = first.select(torch.zeros(0, dtype=torch.long))
    append_rows(gathered, cached_rows)
    return gathered
