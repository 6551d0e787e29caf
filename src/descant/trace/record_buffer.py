"""The records of a trace that is being written, within a limit of bytes."""

from __future__ import annotations

from typing import Final

from descant.trace.records import Cut, Record, line_of

__all__ = ["Kept"]

_DETAILS: Final = 0.7  # of the limit; beyond it only the tokens taken are kept of a look
_STEPS: Final = 0.9  # beyond it no more steps, so that there is room for what they came to
_RESERVE: Final = 256  # bytes for the notes of what was cut


class Kept:
    """Records, and how many bytes their lines have, which never come to more than the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[Record] = []
        self.size = 0
        self._cuts: set[str] = set()

    def lacks(self, what: str) -> bool:
        """Whether there was no more room for such records."""
        return what in self._cuts

    def put(self, *records: Record, what: str, step: int) -> bool:
        """Take records that belong together if there is room for such; the first time not, say so."""
        lines = [line_of(record) for record in records]
        size = sum(map(len, lines)) + len(lines)
        most = self.limit * _STEPS if what in ("steps", "requests") else self.limit
        if self.lacks(what) or self.size + size > most - _RESERVE:
            self.cut(what, step)
            return False
        self._take(*records, size=size)
        if self.size > self.limit * _DETAILS:
            self.cut("details", step + 1)
        return True

    def cut(self, what: str, step: int) -> None:
        """From this step on there is no room for such records."""
        if not self.lacks(what):
            self._cuts.add(what)
            note = Cut(step, what)
            self._take(note, size=len(line_of(note)) + 1)

    def _take(self, *records: Record, size: int) -> None:
        self.records += records
        self.size += size
