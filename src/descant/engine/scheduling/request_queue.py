"""A sorted queue of requests."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

__all__ = ["RequestQueue"]

_MIN_COMPACTED = 64  # a smaller heap is not worth rebuilding


class RequestQueue:
    """Request numbers by key, the smallest first, equal keys by number; each operation is O(log n).

    A removed entry stays in the heap until it comes to the front or half of the heap is such entries.
    """

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, number: int) -> bool:
        return number in self._keys

    def add(self, number: int, key: float) -> None:
        """Add a request that is not in the queue."""
        self._keys[number] = key
        heappush(self._heap, (key, number))

    def discard(self, number: int) -> None:
        """Remove a request, if it is in the queue."""
        self._keys.pop(number, None)
        if len(self._heap) > max(_MIN_COMPACTED, 2 * len(self._keys)):
            self._heap = [(key, number) for number, key in self._keys.items()]
            heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """The key and number of the first request; None: the queue is empty."""
        while self._heap:
            key, number = self._heap[0]
            if self._keys.get(number) == key:
                return key, number
            heappop(self._heap)
        return None
