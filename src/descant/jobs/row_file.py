"""One file of a source: what every format offers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from descant.errors import InputError

__all__ = ["RowBlock", "RowData", "RowFile"]

RowData = Mapping[str, Any] | InputError  # the data of a row, or why it has none


class RowBlock(NamedTuple):
    """Rows of a file that begin at one offset."""

    offset: int
    rows: int
    data: Iterable[RowData] = ()  # of these rows, where a scan reads their ids
    skip: int = 0  # rows from the offset on that come before the block


class RowFile(Protocol):
    """A file of rows in one format."""

    @property
    def is_text(self) -> bool:
        """Whether all values are texts."""

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """All rows in order; their data have at least the column of the ids, None: there are no data."""

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from an offset on, without the first ones; 0 is the first row."""
