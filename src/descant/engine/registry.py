"""A shelf: things that rows name by number, each kept once and as long as somebody names it."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["Shelf"]

Thing = TypeVar("Thing")


class Shelf(Generic[Thing]):
    """Things by number; what has the same key has the same number."""

    def __init__(self) -> None:
        self.items: dict[int, Thing] = {}
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._users: dict[int, int] = {}
        self._next = count()

    def put(self, key: Hashable, thing: Thing) -> int:
        """The number of a thing, which has one user more."""
        number = self._numbers.get(key)
        if number is None:
            number = next(self._next)
            self.items[number], self._numbers[key], self._keys[number] = thing, number, key
        self._users[number] = self._users.get(number, 0) + 1
        return number

    def drop(self, number: int) -> None:
        """Say that a user has gone; the last one takes the thing along. -1 stands for nothing."""
        if number < 0:
            return
        self._users[number] -= 1
        if not self._users[number]:
            del self.items[number], self._users[number], self._numbers[self._keys.pop(number)]
