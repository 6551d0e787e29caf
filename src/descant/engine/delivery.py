"""Events on their way from the engine's thread to its callers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from descant.engine.events import RequestEvent

__all__ = ["Delivery", "LoopReceiver", "QueueReceiver", "Receiver"]


class Receiver(Protocol):
    """Where the events of a request go."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that waits for them; None: a thread does."""
        ...

    def put(self, event: RequestEvent) -> None:
        """Hand an event over, in that loop or in the engine's thread."""
        ...


@dataclass(eq=False)
class QueueReceiver:
    """The receiver of a thread."""

    events: queue.SimpleQueue[RequestEvent] = field(default_factory=queue.SimpleQueue)
    loop: None = None

    def put(self, event: RequestEvent) -> None:
        """Hand an event over."""
        self.events.put(event)


@dataclass(eq=False)
class LoopReceiver:
    """The receiver of a task."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[RequestEvent] = field(default_factory=asyncio.Queue)

    def put(self, event: RequestEvent) -> None:
        """Hand an event over, in the loop."""
        self.events.put_nowait(event)


_Letter = tuple[int, Receiver, RequestEvent]


class Delivery:
    """The events of a step, which reach every event loop in one call: waking a loop costs a system call."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[_Letter]] = {}

    def add(self, number: int, receiver: Receiver, event: RequestEvent) -> None:
        """Hand an event of a request to a thread at once, to a loop with the next `send`."""
        if receiver.loop is None:
            receiver.put(event)
        else:
            self._by_loop.setdefault(receiver.loop, []).append((number, receiver, event))

    def send(self) -> list[int]:
        """Hand the events over; the requests whose loop is closed."""
        unreached: dict[int, None] = {}
        by_loop, self._by_loop = self._by_loop, {}
        for loop, letters in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, letters)
            except RuntimeError:
                unreached |= dict.fromkeys(number for number, _, _ in letters)
        return list(unreached)


def _put_all(letters: Sequence[_Letter]) -> None:
    for _, receiver, event in letters:
        receiver.put(event)
