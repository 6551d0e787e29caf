"""Files of rows in JSON lines and in CSV."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, NamedTuple

from descant.api.json_lines import parse_line
from descant.errors import InputError
from descant.jobs.row_file import RowBlock, RowData
from descant.jobs.source_content import SourceFile

__all__ = ["CsvFile", "JsonLinesFile"]


@dataclass(frozen=True)
class JsonLinesFile:
    """A JSON object in each line; blank lines do not count."""

    file: SourceFile
    is_text: ClassVar[bool] = False

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each line that is not blank."""
        offset = 0
        with self.file.open() as file:
            for line in file:
                if line.strip():
                    yield RowBlock(offset, 1, () if id_column is None else (_parse_json(line),))
                offset += len(line)

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from an offset in bytes on."""
        with self.file.open() as file:
            file.seek(offset)
            for line in itertools.islice((line for line in file if line.strip()), skip, None):
                yield _parse_json(line)


def _parse_json(line: bytes) -> RowData:
    try:
        return parse_line(line)
    except InputError as error:
        return error


class CsvHeader(NamedTuple):
    """The names of the columns, and the offset of what follows them."""

    names: list[str]
    end: int


class _CountedLines:
    """Lines of a text, and the offset in bytes after the last one that was taken."""

    def __init__(self, lines: Iterable[str], offset: int) -> None:
        self._lines, self.offset = iter(lines), offset

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.offset += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        return line


@dataclass(frozen=True)
class CsvFile:
    """Fields by the names of a header; blank lines do not count."""

    file: SourceFile
    is_text: ClassVar[bool] = True

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each row, which may span lines."""
        header = self._read_header()
        with self.file.open() as file, _decode(file) as text:
            file.read(header.end)
            for offset, data in _csv_rows(text, header.names, header.end):
                yield RowBlock(offset, 1, () if id_column is None else (data,))

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from an offset in bytes on."""
        header = self._read_header()
        start = max(offset, header.end)
        with self.file.open() as file, _decode(file) as text:
            file.seek(start)
            for _, data in itertools.islice(_csv_rows(text, header.names, start), skip, None):
                yield data

    def _read_header(self) -> CsvHeader:
        with self.file.open() as file, _decode(file) as text:
            start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            file.seek(start)
            lines = _CountedLines(text, start)
            try:
                names = next(csv.reader(lines, strict=True), [])
            except csv.Error as error:
                raise InputError("source", f"must be CSV with a header ({error})", self.file.path) from None
        if not names or len(set(names)) < len(names):
            raise InputError(
                "source", "must have a header of different names", names, f"see {self.file.path}"
            )
        return CsvHeader(names, lines.offset)


def _decode(file: BinaryIO) -> io.TextIOWrapper:
    # Bytes that are no UTF-8 become lone surrogates, which only their own row is refused for.
    return io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")


def _csv_rows(text: Iterable[str], names: list[str], offset: int) -> Iterator[tuple[int, RowData]]:
    """The offset of each row, and its fields or why there are none."""
    lines = _CountedLines(text, offset)
    reader = csv.reader(lines, strict=True)  # takes no line before it needs it
    while True:
        start = lines.offset
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # By its offset, which is the same from whatever row the reading began.
            yield start, InputError("source", f"must be CSV ({error})", f"the row at byte {start}")
            continue
        if not fields:
            continue  # a blank line
        if len(fields) != len(names):
            yield start, InputError("source", f"must have {len(names)} fields in each row", fields)
        elif any("\udc80" <= char <= "\udcff" for char in "".join(fields)):
            yield start, InputError("source", "must be UTF-8", fields)
        else:
            yield start, dict(zip(names, fields, strict=True))
