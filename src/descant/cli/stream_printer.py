"""Prints stream events to standard output."""

from __future__ import annotations

from typing import Final

from descant.api.stream import StreamEvent
from descant.cli import terminal

__all__ = ["StreamPrinter"]

SEPARATOR: Final = "---\n"


class StreamPrinter:
    """Prints sequences one after the other: the first one as it grows, the others afterwards."""

    def __init__(self) -> None:
        self._pending_texts: dict[int, str] = {}  # not printed yet
        self._finished: set[int] = set()
        self._current = 0
        self._has_separator = True  # the first sequence needs none
        self._last_char = "\n"
        self._output = terminal.UntrustedText()

    def print_event(self, event: StreamEvent) -> None:
        """Print what is next in order; raises the error of an event."""
        if event.error is not None:
            raise event.error
        self._pending_texts[event.sequence] = self._pending_texts.get(event.sequence, "") + (event.text or "")
        if event.finish_reason is not None:
            self._finished.add(event.sequence)
        while True:
            text = self._pending_texts.pop(self._current, "")
            if not self._has_separator and (text or self._current in self._finished):
                self.end_line()
                self._write(SEPARATOR)
                self._has_separator = True
            self._write(text)
            if self._current not in self._finished:
                return
            self._current += 1
            self._has_separator = False

    def end_line(self) -> None:
        """End the last line, if needed."""
        if self._last_char != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last_char = text[-1]  # before writing, which may be interrupted
            self._output.write(text)
