"""Where rows begin in the files of a source."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["RowPosition", "RowPositions"]


class RowPosition(NamedTuple):
    """A place in a source from which rows can be read."""

    file: int  # its index among the files of the source
    offset: int  # in bytes; the row group in Parquet, the record batch in Arrow files
    skip: int = 0  # rows from there on that come before it


def _numbers() -> array[int]:
    return array("Q")


@dataclass
class RowPositions:
    """Positions in the order of the source, 8 bytes for each, or 16 where there are rows to skip."""

    _offsets: array[int] = field(default_factory=_numbers)
    _skips: array[int] = field(default_factory=_numbers)  # empty as long as there is nothing to skip
    _firsts: array[int] = field(default_factory=_numbers)  # by file: the positions before it

    def append(self, position: RowPosition) -> None:
        """Add a position that is not before the last one."""
        while len(self._firsts) <= position.file:
            self._firsts.append(len(self._offsets))
        if position.skip or self._skips:
            self._skips.extend([0] * (len(self._offsets) - len(self._skips)))
            self._skips.append(position.skip)
        self._offsets.append(position.offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> RowPosition:
        number = range(len(self))[index]
        skip = self._skips[number] if self._skips else 0
        return RowPosition(bisect_right(self._firsts, number) - 1, self._offsets[number], skip)

    def __iter__(self) -> Iterator[RowPosition]:
        return (self[number] for number in range(len(self)))
