"""The rows of a job's source: its files, one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from descant.errors import InputError
from descant.jobs.arrow_files import ArrowFile, ParquetFile
from descant.jobs.dataset_folder import dataset_files
from descant.jobs.id_digests import IdDigests, RowId, id_digest
from descant.jobs.row_file import RowData, RowFile
from descant.jobs.row_position import RowPosition, RowPositions
from descant.jobs.source_content import SourceContent, SourceFile
from descant.jobs.text_files import CsvFile, JsonLinesFile

__all__ = ["SOURCE_FORMATS", "JobSource", "SourceRow", "SourceSummary", "parse_text"]

SOURCE_FORMATS: Final = (".jsonl", ".csv", ".parquet", ".arrow", ".feather")
_START: Final = RowPosition(0, 0)


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
    """The number of rows of a source, its encoded content, and where each shard begins."""

    rows: int
    content: bytes
    positions: RowPositions


@dataclass(frozen=True)
class JobSource:
    """Files of rows, and the column with their ids; None: a row's id is its index.

    A folder that `Dataset.save_to_disk` wrote stands for its files. `known` is the content that an earlier
    scan has found; None: it is that of the first reading. Rows of any other content are an error.
    """

    paths: Sequence[str]
    id_column: str | None = None
    columns: Collection[str] | None = None  # that are read of Parquet and Arrow; None: all
    known: bytes | None = None

    def scan(self, shard_rows: int) -> SourceSummary:
        """Read all files; raises InputError for ids that are not unique."""
        positions, ids = RowPositions(), IdDigests()
        rows = next_start = 0
        for number, file in enumerate(self._files):
            for block in file.blocks(self.id_column):
                while next_start < rows + block.rows:
                    positions.append(RowPosition(number, block.offset, block.skip + next_start - rows))
                    next_start += shard_rows
                for data in block.data:
                    row_id = self._id_of(data)
                    if row_id is not None:
                        ids.add(row_id)
                rows += block.rows
        for digests in ids.repeated():
            self._check_ids(digests)
        return SourceSummary(rows, self._content.encode(), positions)

    def rows_at(self, position: RowPosition, index: int, count: int) -> Iterator[SourceRow]:
        """The rows `index` to `index + count`, of which the first is at a position."""
        return itertools.islice(self._rows(position, index), count)

    def check(self) -> None:
        """Read all files again; raises InputError for one that has changed."""
        self._content.check(self._find_files())

    def __iter__(self) -> Iterator[SourceRow]:
        return self._rows(_START, 0)

    @cached_property
    def _content(self) -> SourceContent:
        paths = self._find_files()
        return SourceContent.read(paths) if self.known is None else SourceContent.decode(self.known, paths)

    def _find_files(self) -> list[str]:
        return [
            file for path in self.paths for file in (dataset_files(path) if os.path.isdir(path) else [path])
        ]

    @cached_property
    def _files(self) -> list[RowFile]:
        return [self._open(file) for file in self._content.files]

    def _open(self, file: SourceFile) -> RowFile:
        if file.path.endswith(".csv"):
            return CsvFile(file)
        if file.path.endswith(".jsonl"):
            return JsonLinesFile(file)
        ids = () if self.id_column is None else (self.id_column,)
        columns = None if self.columns is None else frozenset((*self.columns, *ids))
        return ParquetFile(file, columns) if file.path.endswith(".parquet") else ArrowFile(file, columns)

    def _rows(self, position: RowPosition, index: int) -> Iterator[SourceRow]:
        """All rows from a position on."""
        offset, skip = position.offset, position.skip
        for file in self._files[position.file :]:
            for data in file.rows_from(offset, skip):
                yield self._row(index, data, file.is_text)
                index += 1
            offset = skip = 0

    def _row(self, index: int, data: RowData, is_text: bool) -> SourceRow:
        if isinstance(data, InputError):
            return SourceRow(index, {}, None if self.id_column else index, is_text, data)
        if self.id_column is None:
            return SourceRow(index, data, index, is_text)
        row_id = self._id_of(data)
        if row_id is None:
            must = "must hold the row's id, a text or an integer"
            error = InputError(self.id_column, must, data.get(self.id_column))
            return SourceRow(index, data, None, is_text, error)
        return SourceRow(index, data, row_id, is_text)

    def _id_of(self, data: RowData) -> RowId | None:
        """The id in the column of the ids; None: there is none."""
        if self.id_column is None or isinstance(data, InputError):
            return None
        value = data.get(self.id_column)
        is_id = isinstance(value, int | str) and not isinstance(value, bool) and value != ""
        return value if is_id else None

    def _check_ids(self, digests: Collection[int]) -> None:
        """Raise InputError for two rows of the same id, of which the digest is given."""
        first: dict[RowId, int] = {}
        for row in dataclasses.replace(self, columns=(), known=self._content.encode()):
            if row.id is None or id_digest(row.id) not in digests:
                continue
            if row.id in first:
                rows = f"rows {first[row.id]} and {row.index}"
                must = f"must have another id in `{self.id_column}` for each row ({rows} share one)"
                raise InputError("id_column", must, row.id)
            first[row.id] = row.index


def parse_text(text: str) -> Any:
    """The JSON value of a field of CSV; text that is no JSON is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
