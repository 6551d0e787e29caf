"""The rows of a job's source: files of JSON lines or CSV, one after the other."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

from descant.api.json_lines import parse_line
from descant.errors import InputError

__all__ = ["JobSource", "SourceRow", "SourceSummary", "parse_text"]

RowId = int | str
_CHUNK_BYTES: Final = 2**20


class CsvReader(Protocol):
    """What `csv.reader` returns."""

    @property
    def line_num(self) -> int:
        """The number of lines read."""

    def __next__(self) -> list[str]:
        """The fields of the next row."""


@dataclass(frozen=True)
class SourceRow:
    """One row: its index in the source, and its data or why it has none."""

    index: int
    data: Mapping[str, Any]
    id: RowId | None  # None: it has none, as `error` says
    is_text: bool = False  # whether all its values are texts, as in CSV
    error: InputError | None = None


@dataclass(frozen=True)
class SourceSummary:
    """The number of rows of a source, and the digest of its files."""

    rows: int
    digest: str


@dataclass(frozen=True)
class JobSource:
    """Files of rows, and the column with their ids; None: a row's id is its index."""

    paths: Sequence[str]
    id_column: str | None = None

    def scan(self) -> SourceSummary:
        """Read all files once; raises InputError for ids that are not unique."""
        digest = hashlib.blake2b(digest_size=16, person=b"descant source")
        for path in self.paths:
            with _open(path) as file:
                content = hashlib.blake2b(digest_size=32)
                while data := file.read(_CHUNK_BYTES):
                    content.update(data)
            digest.update(path.rpartition(".")[2].encode() + content.digest())
        count, first = 0, dict[RowId, int]()
        for row in self:
            count += 1
            if self.id_column is not None and row.id is not None:
                if row.id in first:
                    rows = f"rows {first[row.id]} and {row.index}"
                    must = f"must have another id in `{self.id_column}` for each row ({rows} share one)"
                    raise InputError("id_column", must, row.id)
                first[row.id] = row.index
        return SourceSummary(count, digest.hexdigest())

    def __iter__(self) -> Iterator[SourceRow]:
        index = 0
        for path in self.paths:
            with _open(path) as file:
                is_text = path.endswith(".csv")
                for data in _csv_rows(file, path) if is_text else _json_rows(file):
                    yield self._row(index, data, is_text)
                    index += 1

    def _row(self, index: int, data: Mapping[str, Any] | InputError, is_text: bool) -> SourceRow:
        if isinstance(data, InputError):
            return SourceRow(index, {}, None if self.id_column else index, is_text, data)
        if self.id_column is None:
            return SourceRow(index, data, index, is_text)
        value = data.get(self.id_column)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            error = InputError(self.id_column, "must hold the row's id, a text or an integer", value)
            return SourceRow(index, data, None, is_text, error)
        return SourceRow(index, data, value, is_text)


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError("source", f"must be files that can be opened ({error.strerror})", path) from None


def _json_rows(file: BinaryIO) -> Iterator[Mapping[str, Any] | InputError]:
    """The object of each line that is not blank, or why there is none."""
    for line in file:
        if not line.strip():
            continue
        try:
            yield parse_line(line)
        except InputError as error:
            yield error


def _csv_rows(file: BinaryIO, path: str) -> Iterator[Mapping[str, Any] | InputError]:
    """The fields of each row by the names of the header, or why there are none."""
    # Bytes that are no UTF-8 become lone surrogates, which only their own row is refused for.
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        yield from _csv_fields(csv.reader(text, strict=True), path)


def _csv_fields(reader: CsvReader, path: str) -> Iterator[Mapping[str, Any] | InputError]:
    """The fields of each row that a reader gives, or why there are none."""
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise InputError("source", f"must be CSV with a header ({error})", path) from None
    if not names or len(set(names)) < len(names):
        raise InputError("source", "must have a header of different names", names, f"see {path}")
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield InputError("source", f"must be CSV ({error})", f"line {reader.line_num}")
            continue
        if not fields:
            continue  # a blank line
        if len(fields) != len(names):
            yield InputError("source", f"must have {len(names)} fields in each row", fields)
        elif any("\udc80" <= char <= "\udcff" for char in "".join(fields)):
            yield InputError("source", "must be UTF-8", fields)
        else:
            yield dict(zip(names, fields, strict=True))


def parse_text(text: str) -> Any:
    """The JSON value of a field of CSV; text that is no JSON is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
