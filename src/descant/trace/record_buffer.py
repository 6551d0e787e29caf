"""The records of a trace that is being written, within a limit of bytes."""

from __future__ import annotations

from typing import Final

from descant.trace.records import TraceRecord, TruncationRecord, to_json_line

__all__ = ["RecordBuffer"]

_DETAIL_SHARE: Final = 0.7  # of the limit; beyond it only the tokens taken are kept of a look
_STEP_SHARE: Final = 0.9  # beyond it no more steps, so that there is room for what they came to
_RESERVED_BYTES: Final = 256  # bytes for the notes of what was cut


class RecordBuffer:
    """Records, and how many bytes their lines have, which never come to more than the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[TraceRecord] = []
        self.num_bytes = 0
        self._truncated: set[str] = set()

    def is_truncated(self, what: str) -> bool:
        """Whether there was no more room for such records."""
        return what in self._truncated

    def add(self, *records: TraceRecord, what: str, step: int) -> bool:
        """Take records that belong together if there is room for such; the first time not, say so."""
        lines = [to_json_line(record) for record in records]
        size = sum(map(len, lines)) + len(lines)
        most = self.limit * _STEP_SHARE if what in ("steps", "requests") else self.limit
        if self.is_truncated(what) or self.num_bytes + size > most - _RESERVED_BYTES:
            self.truncate(what, step)
            return False
        self._append(*records, size=size)
        if self.num_bytes > self.limit * _DETAIL_SHARE:
            self.truncate("details", step + 1)
        return True

    def truncate(self, what: str, step: int) -> None:
        """From this step on there is no room for such records."""
        if not self.is_truncated(what):
            self._truncated.add(what)
            note = TruncationRecord(step, what)
            self._append(note, size=len(to_json_line(note)) + 1)

    def _append(self, *records: TraceRecord, size: int) -> None:
        self.records += records
        self.num_bytes += size
