"""The archive: the keys and values of sequences that have ended, kept while anybody holds the sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from descant.core.interfaces import Cache
from descant.core.records import Hypothesis
from descant.core.rows import Rows
from descant.kv_cache.cached_row import Past, inside

__all__ = ["Archive"]


class Archive:
    """What the rows hold that sequences ended on: all of their tokens but the last, which is never fed.

    An entry goes when its sequence does, so that what a beam search throws out again takes no room.
    """

    def __init__(self) -> None:
        self._wanted: set[int] = set()  # requests
        self._held: dict[int, tuple[weakref.ref[Hypothesis], Past]] = {}  # by the sequence's identity

    def __len__(self) -> int:
        return len(self._held)

    def open(self, request: int) -> None:
        """Keep what this request's sequences hold."""
        self._wanted.add(request)

    def close(self, request: int) -> None:
        """Keep no more of this request."""
        self._wanted.discard(request)

    def of(self, sequences: Sequence[Hypothesis]) -> list[Past]:
        """What these sequences hold, if they were of requests that are kept."""
        return [self._held[id(one)][1] for one in sequences if id(one) in self._held]

    def retire(
        self, cache: Cache, rows: Rows, ended: Sequence[tuple[int, Hypothesis]], going: Tensor
    ) -> None:
        """Copy what the fed rows hold that sequences ended on, before the cache lets them go.

        `going` [R] (host) is how much of every row will go on.
        """
        mine = [(row, one) for row, one in ended if int(rows.request[row]) in self._wanted]
        if not mine:
            return
        place = torch.tensor([row for row, _ in mine])
        new = torch.tensor([len(one.tokens) for _, one in mine])
        # Only what is committed can be taken, and some caches cannot take back what is.
        cache.commit(None, going.scatter(0, place, (rows.offset + rows.prompt)[place] + new - 1))
        whole, lies = inside(cache, place)
        store = whole.select(lies)
        for line, (_, one) in enumerate(mine):
            key = id(one)
            gone = weakref.ref(one, lambda _, key=key: self._held.pop(key, None))  # type: ignore[misc]
            self._held[key] = (gone, Past(store, line))
