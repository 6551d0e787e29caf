"""One file of a source: what every format offers, and how its bytes are read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from descant.errors import InputError

__all__ = ["ContentDigest", "RowBlock", "RowData", "RowFile", "hash_file", "open_file", "open_hashed"]

RowData = Mapping[str, Any] | InputError  # the data of a row, or why it has none
_CHUNK_BYTES: Final = 2**20


class ContentDigest(Protocol):
    """What takes the bytes of a file."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""


class RowBlock(NamedTuple):
    """Rows of a file that begin at one offset."""

    offset: int
    rows: int
    data: Iterable[RowData] = ()  # of these rows, where a scan reads their ids
    skip: int = 0  # rows from the offset on that come before the block


class RowFile(Protocol):
    """A file of rows in one format."""

    @property
    def path(self) -> str:
        """The path of the file."""

    @property
    def is_text(self) -> bool:
        """Whether all values are texts."""

    def blocks(self, digest: ContentDigest, id_column: str | None) -> Iterator[RowBlock]:
        """All rows in order, while the bytes of the file go into a digest.

        The data have at least the column of the ids; None: there are no data.
        """

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from an offset on, without the first ones; 0 is the first row."""


class _HashedFile(io.RawIOBase):
    """A file whose bytes go into a digest as they are read."""

    def __init__(self, path: str, digest: ContentDigest) -> None:
        self._file, self._digest, self._offset = open_file(path, buffering=0), digest, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._digest.update(data)
        self._offset += len(data)
        return len(data)

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        self._file.close()
        super().close()


def open_file(path: str, buffering: int = -1) -> BinaryIO:
    """A file of a source, open for reading."""
    try:
        return open(path, "rb", buffering=buffering)
    except OSError as error:
        raise InputError("source", f"must be files that can be opened ({error.strerror})", path) from None


def open_hashed(path: str, digest: ContentDigest) -> BinaryIO:
    """A file whose bytes go into a digest as they are read, from its start to its end."""
    return io.BufferedReader(_HashedFile(path, digest), _CHUNK_BYTES)


def hash_file(path: str, digest: ContentDigest) -> None:
    """Put all bytes of a file into a digest."""
    with open_file(path) as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
