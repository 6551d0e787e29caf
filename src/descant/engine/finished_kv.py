"""The keys and values of finished sequences, kept as long as the sequence itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from descant.core.interfaces import RowCache
from descant.core.records import Hypothesis
from descant.core.rows import Rows
from descant.kv_cache.cached_row import CachedRow, unwrap_cache
from descant.kv_cache.paged import PagedStore

__all__ = ["FinishedKV"]


class FinishedKV:
    """Copies of the cached rows on which sequences ended: all tokens but the last, which is never fed.

    An entry is freed with its sequence, so that sequences that beam search discards cost no memory. With a
    limited block pool, rows that are returned are copied out of it, and the others give way to requests.
    """

    def __init__(self, *, is_pool_limited: bool = False) -> None:
        self._is_pool_limited = is_pool_limited
        self._requests: dict[int, bool] = {}  # whether their rows are returned
        self._entries: dict[int, tuple[weakref.ref[Hypothesis], CachedRow]] = {}  # by the sequence's id()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: int, *, returned: bool) -> None:
        """Capture the sequences of this request, whose rows may be returned to the caller."""
        self._requests[request] = returned

    def remove(self, request: int) -> None:
        """Stop capturing the sequences of this request."""
        self._requests.pop(request, None)

    def get(self, sequences: Sequence[Hypothesis]) -> list[CachedRow | None]:
        """The row of each sequence; None: it was not captured, or has given way to requests."""
        return [self._entries[id(one)][1] if id(one) in self._entries else None for one in sequences]

    def limit_idle(self, limit: int) -> None:
        """Drop the oldest rows that are not returned until at most `limit` blocks of their pool are idle."""
        for key in list(self._entries) if self._is_pool_limited else ():
            # Another thread may have dropped the sequence meanwhile, and its entry with it. Nothing here may
            # hold an earlier row: its blocks would still count as idle.
            entry = self._entries.get(key)
            store = None if entry is None else entry[1].store
            if isinstance(store, PagedStore) and store.is_reclaimable and store.pool.num_idle > limit:
                self._entries.pop(key, None)

    def capture(
        self, cache: RowCache, rows: Rows, ended: Sequence[tuple[int, Hypothesis]], kept_lengths: Tensor
    ) -> None:
        """Copy the fed rows on which sequences ended, before the cache drops them.

        `kept_lengths` [R] (host) is how much of every row remains in use.
        """
        selected = [(row, one) for row, one in ended if int(rows.request[row]) in self._requests]
        if not selected:
            return
        index = torch.tensor([row for row, _ in selected])
        num_new = torch.tensor([len(one.tokens) for _, one in selected])
        # Only committed positions can be copied, and some caches cannot cut committed positions.
        lengths = (rows.offset + rows.prompt_length)[index] + num_new - 1
        cache.commit(None, kept_lengths.scatter(0, index, lengths))
        store, store_rows = unwrap_cache(cache, index)
        if self._is_pool_limited and isinstance(store, PagedStore):
            owners = rows.request[index].tolist()
            pairs = zip(owners, store_rows.tolist(), strict=True)
            copies = [CachedRow(self._copy_from_pool(store, owner, row)) for owner, row in pairs]
        else:
            selection = store.select(store_rows)
            copies = [CachedRow(selection, row) for row in range(len(selected))]
        for copied, (_, sequence) in zip(copies, selected, strict=True):
            key = id(sequence)
            ref = weakref.ref(sequence, lambda _, key=key: self._entries.pop(key, None))  # type: ignore[misc]
            self._entries[key] = (ref, copied)

    def _copy_from_pool(self, store: PagedStore, request: int, row: int) -> PagedStore:
        """A row of a request as a store: in a pool of its own, or with blocks that it gives up again."""
        selected = store.select(torch.tensor([row]))
        if self._requests[request]:
            copied = PagedStore(store.pool.block_size)
            copied.join(selected)
            return copied
        selected.mark_reclaimable()
        return selected
