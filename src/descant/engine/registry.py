"""A shelf: things that rows name by number, each kept once and as long as somebody names it."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["RefCountedRegistry"]

Item = TypeVar("Item")


class RefCountedRegistry(Generic[Item]):
    """Things by number; what has the same key has the same number."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self._ids: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._refcounts: dict[int, int] = {}
        self._next_id = count()

    def acquire(self, key: Hashable, thing: Item) -> int:
        """The number of a thing, which has one user more."""
        number = self._ids.get(key)
        if number is None:
            number = next(self._next_id)
            self.items[number], self._ids[key], self._keys[number] = thing, number, key
        self._refcounts[number] = self._refcounts.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Say that a user has gone; the last one takes the thing along. -1 stands for nothing."""
        if number < 0:
            return
        self._refcounts[number] -= 1
        if not self._refcounts[number]:
            del self.items[number], self._refcounts[number], self._ids[self._keys.pop(number)]
