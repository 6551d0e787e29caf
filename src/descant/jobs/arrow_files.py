"""Files of rows in Parquet and in Arrow's stream and file formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Final, NamedTuple

from descant.jobs.arrow_library import arrow_errors, load_pyarrow
from descant.jobs.arrow_values import batch_rows
from descant.jobs.row_file import RowBlock, RowData
from descant.jobs.source_content import SourceFile

__all__ = ["ArrowFile", "ParquetFile"]

_BATCH_ROWS: Final = 1024  # that are Python values at once
_FILE_MAGIC: Final = b"ARROW1"


@dataclass(frozen=True)
class ParquetFile:
    """Rows in row groups; an offset is the index of one."""

    file: SourceFile
    columns: Collection[str] | None = None  # that are read; None: all
    is_text: ClassVar[bool] = False

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each row group; without ids only its number of rows is read."""
        load_pyarrow()
        with self.file.open() as file, arrow_errors(self.file.path, "a Parquet file"):
            reader = _open_parquet(file)
            for group in range(reader.num_row_groups):
                rows = reader.metadata.row_group(group).num_rows
                data = () if id_column is None else _group_rows(reader, group, (id_column,))
                yield RowBlock(group, rows, data)

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from a row group on."""
        load_pyarrow()
        with self.file.open() as file, arrow_errors(self.file.path, "a Parquet file"):
            reader = _open_parquet(file)
            for group in range(offset, reader.num_row_groups):
                yield from _group_rows(reader, group, self.columns, skip)
                skip = max(0, skip - reader.metadata.row_group(group).num_rows)


def _open_parquet(file: BinaryIO) -> Any:
    # Without a buffer for all row groups at once.
    return load_pyarrow().parquet.ParquetFile(file, pre_buffer=False)


def _group_rows(reader: Any, group: int, columns: Collection[str] | None, skip: int = 0) -> Iterator[RowData]:
    """The rows of a row group without the first ones."""
    names = None if columns is None else [name for name in reader.schema_arrow.names if name in columns]
    if names == []:  # without columns the library would not count the rows
        yield from ({} for _ in range(skip, reader.metadata.row_group(group).num_rows))
        return
    batches = reader.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names, use_threads=False)
    yield from _skipped_rows(batches, columns, skip)


@dataclass(frozen=True)
class ArrowFile:
    """Rows in record batches; an offset is the index of one in a file, and a place in bytes in a stream."""

    file: SourceFile
    columns: Collection[str] | None = None  # that become Python values; None: all
    is_text: ClassVar[bool] = False

    def blocks(self, id_column: str | None) -> Iterator[RowBlock]:
        """Each record batch."""
        header = self._stream_header()
        if header is None:
            with self.file.open() as file, arrow_errors(self.file.path, "an Arrow file"):
                for number, batch in _file_batches(file, 0):
                    yield _batch_block(number, batch, id_column)
            return
        with self.file.open() as file, arrow_errors(self.file.path, "an Arrow stream"):
            file.read(header.end)
            for offset, skip, batch in _stream_batches(file, header):
                yield _batch_block(offset, batch, id_column, skip)

    def rows_from(self, offset: int, skip: int) -> Iterator[RowData]:
        """The rows from a record batch on."""
        header = self._stream_header()
        kind = "an Arrow file" if header is None else "an Arrow stream"
        with self.file.open() as file, arrow_errors(self.file.path, kind):
            if header is None:
                batches = (batch for _, batch in _file_batches(file, offset))
            else:
                file.seek(max(offset, header.end))
                batches = (batch for _, _, batch in _stream_batches(file, header))
            yield from _skipped_rows(batches, self.columns, skip)

    def _stream_header(self) -> StreamHeader | None:
        """The header of a stream; None: it is a file, which has a table of its batches."""
        pyarrow = load_pyarrow()
        with self.file.open() as file, arrow_errors(self.file.path, "an Arrow stream"):
            if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                return None
            file.seek(0)
            schema = pyarrow.ipc.read_schema(pyarrow.PythonFile(file, mode="r"))
            # Batches with dictionaries need those before them, so all are read from the start.
            has_dictionary = any(_has_dictionary(one.type) for one in schema)
            return StreamHeader(schema, 0 if has_dictionary else file.tell(), has_dictionary)


class StreamHeader(NamedTuple):
    """The schema of a stream, and the offset from which its batches are read."""

    schema: Any
    end: int
    has_dictionary: bool


def _batch_block(offset: int, batch: Any, id_column: str | None, skip: int = 0) -> RowBlock:
    data = () if id_column is None else batch_rows(batch, (id_column,))
    return RowBlock(offset, batch.num_rows, data, skip)


def _file_batches(file: BinaryIO, start: int) -> Iterator[tuple[int, Any]]:
    """The record batches of a file from an index on."""
    reader = load_pyarrow().ipc.open_file(file)
    for number in range(start, reader.num_record_batches):
        yield number, reader.get_batch(number)


def _stream_batches(file: BinaryIO, header: StreamHeader) -> Iterator[tuple[int, int, Any]]:
    """The other record batches of a stream, each with an offset and the rows from there to it."""
    pyarrow = load_pyarrow()
    source = pyarrow.PythonFile(file, mode="r")
    if header.has_dictionary:
        rows = 0
        for batch in pyarrow.ipc.open_stream(source):
            yield 0, rows, batch
            rows += batch.num_rows
        return
    while True:
        offset = file.tell()
        try:
            message = pyarrow.ipc.read_message(source)
        except EOFError:
            return
        yield offset, 0, pyarrow.ipc.read_record_batch(message, header.schema)


def _has_dictionary(kind: Any) -> bool:
    """Whether a type has values in a dictionary, which a stream holds apart from its batches."""
    pyarrow = load_pyarrow()
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return bool(pyarrow.types.is_dictionary(kind)) or any(
        _has_dictionary(kind.field(number).type) for number in range(kind.num_fields)
    )


def _skipped_rows(batches: Iterator[Any], columns: Collection[str] | None, skip: int) -> Iterator[RowData]:
    """The rows of record batches without the first ones, a few of them as Python values at once."""
    for batch in batches:
        for start in range(min(skip, batch.num_rows), batch.num_rows, _BATCH_ROWS):
            yield from batch_rows(batch.slice(start, _BATCH_ROWS), columns)
        skip = max(0, skip - batch.num_rows)
