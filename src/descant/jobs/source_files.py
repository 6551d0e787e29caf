"""Files of rows in JSON lines, CSV, Parquet and Arrow, each compared with the bytes that were scanned.

A row that is read later, by any worker, is a row of the bytes that were scanned. A source that is rewritten,
replaced or cut meanwhile is an error wherever a changed block is read, also if the old bytes come back.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import datetime
import decimal
import hashlib
import io
import itertools
import json
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, BinaryIO, ClassVar, Final, NamedTuple, Self

import numpy as np

from descant.api.json_lines import parse_line
from descant.errors import InputError, MissingExtra

BLOCK_BYTES: Final = 2**20
DIGEST_BYTES: Final = 16
_BUFFER_BYTES: Final = 2**16


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its size and the digests of its blocks."""

    path: str
    size: int
    digests: bytes

    @classmethod
    def read(cls, path: str) -> Self:
        """Take the digests of a file's blocks."""
        size, digests = 0, bytearray()
        with _open_raw(path) as file:
            while block := file.read(BLOCK_BYTES):
                size += len(block)
                digests += content_digest(block)
        return cls(path, size, bytes(digests))

    def open(self) -> BinaryIO:
        """The file, open for reading; reading a block that has changed raises InputError."""
        return io.BufferedReader(_ComparedFile(self), _BUFFER_BYTES)

    def describe(self) -> dict[str, Any]:
        """The content as JSON values, without the name."""
        ending = os.path.splitext(self.path)[1]
        return {"format": ending, "bytes": self.size, "blocks": self.digests.hex()}


@dataclass(frozen=True)
class SourceContent:
    """The files of a source in their order."""

    files: tuple[SourceFile, ...]

    @classmethod
    def read(cls, paths: Sequence[str]) -> Self:
        """Read all bytes of some files."""
        return cls(tuple(map(SourceFile.read, paths)))

    @classmethod
    def decode(cls, data: bytes, paths: Sequence[str]) -> Self:
        """The content of `encode` in files of these paths."""
        known = [json.loads(line) for line in data.splitlines()]
        if len(known) != len(paths):
            raise _changed(f"{len(paths)} files")
        return cls(
            tuple(
                SourceFile(path, state["bytes"], bytes.fromhex(state["blocks"]))
                for path, state in zip(paths, known, strict=True)
            )
        )

    def encode(self) -> bytes:
        """A line of JSON for each file."""
        return b"".join(json.dumps(file.describe()).encode() + b"\n" for file in self.files)

    def check(self, paths: Sequence[str]) -> None:
        """Read all bytes again; raises InputError for a file that has changed."""
        if len(paths) != len(self.files):
            raise _changed(f"{len(paths)} files")
        for known, path in zip(self.files, paths, strict=True):
            if SourceFile.read(path).describe() != known.describe():
                raise _changed(path)


class _ComparedFile(io.RawIOBase):
    """A file that is read by blocks, each of which has its known digest."""

    def __init__(self, known: SourceFile) -> None:
        self._known, self._file = known, _open_raw(known.path)
        self._offset, self._number, self._block = 0, -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._known.size}[whence]
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._offset, BLOCK_BYTES)
        if number != self._number:
            self._read_block(number)
        view = memoryview(buffer)
        data = self._block[start : start + len(view)]
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_block(self, number: int) -> None:
        self._file.seek(number * BLOCK_BYTES)
        block = self._file.read(BLOCK_BYTES)
        start = number * DIGEST_BYTES
        # After the last block there is nothing, and must be nothing.
        if (content_digest(block) if block else b"") != self._known.digests[start : start + DIGEST_BYTES]:
            raise _changed(self._known.path)
        self._number, self._block = number, block


def _open_raw(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        # The value of an error is cut where it is long; the advice names the file in full.
        must, do = f"must be files that can be opened ({error.strerror})", f"restore {path}"
        raise InputError("source", must, path, do) from None


def content_digest(data: bytes) -> bytes:
    """The digest of some bytes, for blocks of a source, shards and settings."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _changed(path: str) -> InputError:
    # The value of an error is cut where it is long; the advice names the file in full.
    do = f"restore {path}, or give another folder as `sink`"
    return InputError("source", "must not change during a run", path, do)


RowData = Mapping[str, Any] | InputError  # the data of a row, or why it has none


class RowBlock(NamedTuple):
    """Rows of a file that begin at one offset."""

    offset: int
    rows: int
    data: Iterable[RowData] = ()  # of these rows, where a scan reads their ids
    skip: int = 0  # rows from the offset on that come before the block


class _TextFile:
    """Records in lines; an offset is in bytes."""

    file: SourceFile

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each record; without ids it is not parsed."""
        for offset, record in self._records(0):
            yield RowBlock(offset, 1, () if id_column is None else (self._parse(record),))

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from an offset on."""
        for _, record in itertools.islice(self._records(offset), skip, None):
            yield self._parse(record)

    def _records(self, offset: int) -> Iterator[tuple[int, Any]]:
        raise NotImplementedError

    def _parse(self, record: Any) -> Any:
        return record


@dataclass(frozen=True)
class JsonLinesFile(_TextFile):
    """A JSON object in each line; blank lines do not count."""

    file: SourceFile
    is_text: ClassVar[bool] = False

    def _records(self, offset: int) -> Iterator[tuple[int, bytes]]:
        with self.file.open() as file:
            file.seek(offset)
            for line in file:
                if line.strip():
                    yield offset, line
                offset += len(line)

    def _parse(self, record: bytes) -> RowData:
        try:
            return parse_line(record)
        except InputError as error:
            return error


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
class CsvFile(_TextFile):
    """Fields by the names of a header, in rows that may span lines; blank lines do not count."""

    file: SourceFile
    is_text: ClassVar[bool] = True  # all values are

    def _records(self, offset: int) -> Iterator[tuple[int, RowData]]:
        names, end = self._read_header()
        start = max(offset, end)
        with self.file.open() as file, _decode(file) as text:
            file.seek(start)
            yield from _csv_rows(text, names, start)

    def _read_header(self) -> tuple[list[str], int]:
        """The names of the columns, and the offset of what follows them."""
        with self.file.open() as file, _decode(file) as text:
            start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            file.seek(start)
            lines = _CountedLines(text, start)
            try:
                names = next(csv.reader(lines, strict=True), [])
            except csv.Error as error:
                raise InputError("source", f"must be CSV with a header ({error})", self.file.path) from None
        if not names or len(set(names)) < len(names):
            see = f"see {self.file.path}"
            raise InputError("source", "must have a header of different names", names, see)
        return names, lines.offset


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


# ------------------------------------------------------------------------ Parquet and Arrow
_BATCH_ROWS: Final = 1024  # that are Python values at once
_FILE_MAGIC: Final = b"ARROW1"


def load_pyarrow() -> Any:
    """The optional module `pyarrow` with its parts `ipc` and `parquet`."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("parquet", "a source or sink in Parquet or Arrow") from None
    return pyarrow


class _Chunk(NamedTuple):
    """Rows of a file that are found together: a row group, or a record batch."""

    offset: int
    skip: int  # rows from the offset on that come before the chunk
    num_rows: int
    names: list[str]  # of its columns
    read: Callable[[list[str]], Iterable[Any]]  # its record batches, with some columns


@dataclass(frozen=True)
class ArrowFile:
    """Rows in Parquet or Arrow.

    An offset is the index of a row group in Parquet, of a record batch in Arrow's file format, and a place in
    bytes in a stream.
    """

    file: SourceFile
    columns: Collection[str] | None = None  # that become Python values; None: all
    is_text: ClassVar[bool] = False

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each chunk; without ids only its number of rows is read."""
        for chunk in self._chunks(0):
            data = () if id_column is None else self._rows(chunk, (id_column,))
            yield RowBlock(chunk.offset, chunk.num_rows, data, chunk.skip)

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from a chunk on."""
        for chunk in self._chunks(offset):
            yield from self._rows(chunk, self.columns, skip)
            skip = max(0, skip - chunk.num_rows)

    @cached_property
    def _kind(self) -> str:
        if self.file.path.endswith(".parquet"):
            return "a Parquet file"
        with self.file.open() as file:
            return "an Arrow file" if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC else "an Arrow stream"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the file that the library cannot read."""
        pyarrow = load_pyarrow()
        try:
            yield
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            raise InputError("source", f"must be {self._kind} ({error})", self.file.path) from None

    def _chunks(self, start: int) -> Iterator[_Chunk]:
        """The chunks from an offset on."""
        with self._errors(), self.file.open() as file:
            if self._kind == "a Parquet file":
                yield from _row_groups(file, start)
            elif self._kind == "an Arrow file":
                reader = load_pyarrow().ipc.open_file(file)
                for index in range(start, reader.num_record_batches):
                    yield _batch_chunk(index, 0, reader.get_batch(index))
            else:
                yield from _stream_batches(file, start)

    def _rows(self, chunk: _Chunk, columns: Collection[str] | None, skip: int = 0) -> Iterator[RowData]:
        """The rows of a chunk without the first ones, a few of them as Python values at once.

        Dates, times, decimal numbers and UUIDs become text. A row with bytes or another value that JSON does
        not have is refused.
        """
        names = [name for name in chunk.names if columns is None or name in columns]
        if len(set(names)) < len(names):
            raise InputError("source", "must have columns of different names", names)
        if not names:  # without columns the library would not count the rows
            yield from ({} for _ in range(skip, chunk.num_rows))
            return
        with self._errors():
            for batch in chunk.read(names):
                for start in range(min(skip, batch.num_rows), batch.num_rows, _BATCH_ROWS):
                    part = batch.slice(start, _BATCH_ROWS)
                    for values in zip(*(_values(name, part.column(name)) for name in names), strict=True):
                        error = next((value for value in values if isinstance(value, InputError)), None)
                        yield error or dict(zip(names, values, strict=True))
                skip = max(0, skip - batch.num_rows)


def _row_groups(file: BinaryIO, start: int) -> Iterator[_Chunk]:
    # Without a buffer for all row groups at once.
    reader = load_pyarrow().parquet.ParquetFile(file, pre_buffer=False)

    def read(group: int, names: list[str]) -> Iterable[Any]:
        batches: Iterable[Any] = reader.iter_batches(
            _BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
        )
        return batches

    for group in range(start, reader.num_row_groups):
        num_rows = reader.metadata.row_group(group).num_rows
        yield _Chunk(group, 0, num_rows, reader.schema_arrow.names, partial(read, group))


def _batch_chunk(offset: int, skip: int, batch: Any) -> _Chunk:
    return _Chunk(offset, skip, batch.num_rows, batch.schema.names, lambda names: [batch.select(names)])


def _stream_batches(file: BinaryIO, start: int) -> Iterator[_Chunk]:
    """The record batches of a stream."""
    pyarrow = load_pyarrow()
    source = pyarrow.PythonFile(file, mode="r")
    schema = pyarrow.ipc.read_schema(source)
    if any(_has_dictionary(field.type) for field in schema):
        # Batches with dictionaries need those before them, so all are read from the start.
        file.seek(0)
        rows = 0
        for batch in pyarrow.ipc.open_stream(pyarrow.PythonFile(file, mode="r")):
            yield _batch_chunk(0, rows, batch)
            rows += batch.num_rows
        return
    file.seek(max(start, file.tell()))
    while True:
        offset = file.tell()
        try:
            message = pyarrow.ipc.read_message(source)
        except EOFError:
            return
        yield _batch_chunk(offset, 0, pyarrow.ipc.read_record_batch(message, schema))


def _has_dictionary(kind: Any) -> bool:
    """Whether a type has values in a dictionary, which a stream holds apart from its batches."""
    pyarrow = load_pyarrow()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return bool(pyarrow.types.is_dictionary(kind)) or any(
        _has_dictionary(kind.field(number).type) for number in range(kind.num_fields)
    )


class _NotJson(TypeError):
    """A value that JSON does not have."""


def _values(name: str, column: Any) -> list[Any]:
    """The values of a column; an InputError in place of one that JSON does not have."""
    try:
        return [_json_value(value) for value in column.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, TypeError, KeyError, OverflowError):
        return [_scalar_value(name, scalar) for scalar in column]  # some of them have no such value


def _scalar_value(name: str, scalar: Any) -> Any:
    try:
        return _json_value(scalar.as_py(maps_as_pydicts="strict"))
    except _NotJson as error:
        found = str(error)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        found = f"{scalar.type} ({error})"
    return InputError(name, "must hold values that JSON has", found, "leave the column out")


def _json_value(value: Any) -> Any:
    """A value, its parts included, as JSON would give it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_json_value(item) for item in value]
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise _NotJson("a map whose keys are no texts")
            return {key: _json_value(item) for key, item in value.items()}
        case datetime.datetime() | datetime.time() if getattr(value, "nanosecond", 0):
            raise _NotJson("a time in nanoseconds")  # which Python has only beside another library
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case np.generic():
            return _json_value(value.item())
    raise _NotJson(type(value).__name__)


RowFile = JsonLinesFile | CsvFile | ArrowFile
