"""What a stream of events looks like on standard output."""

from __future__ import annotations

from typing import Final

from descant.api.stream import StreamEvent
from descant.cli import terminal

__all__ = ["Shown"]

SEPARATOR: Final = "---\n"


class Shown:
    """Sequences on standard output, one after the other: the first as it grows, the others thereafter."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # not shown yet
        self._ended: set[int] = set()
        self._current = 0
        self._opened = True  # whether the current one has its separator, which the first has none of
        self._last = "\n"

    def take(self, event: StreamEvent) -> None:
        """Show what an event allows to; raise the error that it brings."""
        if event.error is not None:
            raise event.error
        self._texts[event.sequence] = self._texts.get(event.sequence, "") + (event.text or "")
        if event.finish_reason is not None:
            self._ended.add(event.sequence)
        while True:
            text = self._texts.pop(self._current, "")
            if not self._opened and (text or self._current in self._ended):
                self.end()
                self._write(SEPARATOR)
                self._opened = True
            self._write(text)
            if self._current not in self._ended:
                return
            self._current += 1
            self._opened = False

    def end(self) -> None:
        """End the last line, if it has not ended itself."""
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]  # first, for an interrupt may come while it is written
            terminal.write(text)
