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

__all__ = ["FinishedKV"]


class FinishedKV:
    """Copies of the cached rows on which sequences ended: all tokens but the last, which is never fed.

    An entry is freed with its sequence, so that sequences that beam search discards cost no memory.
    """

    def __init__(self) -> None:
        self._requests: set[int] = set()
        self._entries: dict[int, tuple[weakref.ref[Hypothesis], CachedRow]] = {}  # by the sequence's id()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: int) -> None:
        """Capture the sequences of this request."""
        self._requests.add(request)

    def remove(self, request: int) -> None:
        """Stop capturing the sequences of this request."""
        self._requests.discard(request)

    def get(self, sequences: Sequence[Hypothesis]) -> list[CachedRow]:
        """The rows of those sequences that were captured."""
        return [self._entries[id(one)][1] for one in sequences if id(one) in self._entries]

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
        copied = store.select(store_rows)
        for row, (_, sequence) in enumerate(selected):
            key = id(sequence)
            ref = weakref.ref(sequence, lambda _, key=key: self._entries.pop(key, None))  # type: ignore[misc]
            self._entries[key] = (ref, CachedRow(copied, row))
