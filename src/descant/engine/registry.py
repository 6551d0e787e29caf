"""A registry of objects that rows refer to by id."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["RefCountedRegistry"]

Item = TypeVar("Item")


class RefCountedRegistry(Generic[Item]):
    """Objects by id, with reference counts; objects with equal keys share an id."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self._ids: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._refcounts: dict[int, int] = {}
        self._next_id = count()

    def acquire(self, key: Hashable, item: Item) -> int:
        """Add a reference to an item; return its id."""
        number = self._ids.get(key)
        if number is None:
            number = next(self._next_id)
            self.items[number], self._ids[key], self._keys[number] = item, number, key
        self._refcounts[number] = self._refcounts.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Drop a reference; the last one removes the item. -1 refers to nothing."""
        if number < 0:
            return
        self._refcounts[number] -= 1
        if not self._refcounts[number]:
            del self.items[number], self._refcounts[number], self._ids[self._keys.pop(number)]
