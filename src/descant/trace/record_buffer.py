"""The records of a running trace, within a byte limit."""

from __future__ import annotations

from typing import Final

from descant.trace.records import TraceRecord, TruncationRecord, to_json_line

__all__ = ["RecordBuffer"]

_DETAIL_SHARE: Final = 0.7  # share of the limit beyond which only the chosen tokens are recorded
_STEP_SHARE: Final = 0.9  # share beyond which no steps are recorded, to leave room for results
_RESERVED_BYTES: Final = 256  # for truncation records


class RecordBuffer:
    """Records whose JSON lines never exceed the byte limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: list[TraceRecord] = []
        self.num_bytes = 0
        self._truncated: set[str] = set()

    def is_truncated(self, category: str) -> bool:
        """Whether records of this category are no longer accepted."""
        return category in self._truncated

    def add(self, *records: TraceRecord, what: str, step: int) -> bool:
        """Append records that belong together if they fit, else note the truncation; whether they fit."""
        lines = [to_json_line(record) for record in records]
        size = sum(map(len, lines)) + len(lines)
        limit = self.limit * _STEP_SHARE if what in ("steps", "requests") else self.limit
        if self.is_truncated(what) or self.num_bytes + size > limit - _RESERVED_BYTES:
            self.truncate(what, step)
            return False
        self._append(*records, size=size)
        if self.num_bytes > self.limit * _DETAIL_SHARE:
            self.truncate("details", step + 1)
        return True

    def truncate(self, category: str, step: int) -> None:
        """Accept no records of this category from this step on."""
        if not self.is_truncated(category):
            self._truncated.add(category)
            note = TruncationRecord(step, category)
            self._append(note, size=len(to_json_line(note)) + 1)

    def _append(self, *records: TraceRecord, size: int) -> None:
        self.records += records
        self.num_bytes += size
