"""The archive: the keys and values of sequences that have ended, kept while anybody holds the sequence."""

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
    """What the rows hold that sequences ended on: all of their tokens but the last, which is never fed.

    An entry goes when its sequence does, so that what a beam search throws out again takes no room.
    """

    def __init__(self) -> None:
        self._requests: set[int] = set()  # requests
        self._entries: dict[int, tuple[weakref.ref[Hypothesis], CachedRow]] = {}  # by the sequence's identity

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: int) -> None:
        """Keep what this request's sequences hold."""
        self._requests.add(request)

    def remove(self, request: int) -> None:
        """Keep no more of this request."""
        self._requests.discard(request)

    def get(self, sequences: Sequence[Hypothesis]) -> list[CachedRow]:
        """What these sequences hold, if they were of requests that are kept."""
        return [self._entries[id(one)][1] for one in sequences if id(one) in self._entries]

    def capture(
        self, cache: RowCache, rows: Rows, ended: Sequence[tuple[int, Hypothesis]], going: Tensor
    ) -> None:
        """Copy what the fed rows hold that sequences ended on, before the cache lets them go.

        `going` [R] (host) is how much of every row will go on.
        """
        mine = [(row, one) for row, one in ended if int(rows.request[row]) in self._requests]
        if not mine:
            return
        place = torch.tensor([row for row, _ in mine])
        new = torch.tensor([len(one.tokens) for _, one in mine])
        # Only what is committed can be taken, and some caches cannot take back what is.
        cache.commit(None, going.scatter(0, place, (rows.offset + rows.prompt_length)[place] + new - 1))
        whole, lies = unwrap_cache(cache, place)
        store = whole.select(lies)
        for line, (_, one) in enumerate(mine):
            key = id(one)
            gone = weakref.ref(one, lambda _, key=key: self._entries.pop(key, None))  # type: ignore[misc]
            self._entries[key] = (gone, CachedRow(store, line))
