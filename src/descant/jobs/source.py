"""The rows of a job's source: its files, one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
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
    """The number of rows of a source, the digest of its files, and where each shard begins."""

    rows: int
    digest: str
    positions: RowPositions


@dataclass(frozen=True)
class JobSource:
    """Files of rows, and the column with their ids; None: a row's id is its index.

    A folder that `Dataset.save_to_disk` wrote stands for its files.
    """

    paths: Sequence[str]
    id_column: str | None = None
    columns: Collection[str] | None = None  # that are read of Parquet and Arrow; None: all

    def scan(self, shard_rows: int) -> SourceSummary:
        """Read all files once; raises InputError for ids that are not unique."""
        digest = hashlib.blake2b(digest_size=16, person=b"descant source")
        positions, ids = RowPositions(), IdDigests()
        rows = next_start = 0
        for number, file in enumerate(self._files):
            content = hashlib.blake2b(digest_size=32)
            for block in file.blocks(content, self.id_column):
                while next_start < rows + block.rows:
                    positions.append(RowPosition(number, block.offset, block.skip + next_start - rows))
                    next_start += shard_rows
                for data in block.data:
                    row_id = self._id_of(data)
                    if row_id is not None:
                        ids.add(row_id)
                rows += block.rows
            digest.update(file.path.rpartition(".")[2].encode() + content.digest())
        for digests in ids.repeated():
            self._check_ids(digests)
        return SourceSummary(rows, digest.hexdigest(), positions)

    def rows_at(self, position: RowPosition, index: int, count: int) -> Iterator[SourceRow]:
        """The rows `index` to `index + count`, of which the first is at a position."""
        found = 0
        for row in itertools.islice(self._rows(position, index), count):
            found += 1
            yield row
        if found < count:
            raise InputError("source", "must not change during a run", "fewer rows than before")

    def __iter__(self) -> Iterator[SourceRow]:
        return self._rows(_START, 0)

    @cached_property
    def _files(self) -> list[RowFile]:
        return [
            self._open(file)
            for path in self.paths
            for file in (dataset_files(path) if os.path.isdir(path) else [path])
        ]

    def _open(self, path: str) -> RowFile:
        if path.endswith(".csv"):
            return CsvFile(path)
        if path.endswith(".jsonl"):
            return JsonLinesFile(path)
        ids = () if self.id_column is None else (self.id_column,)
        columns = None if self.columns is None else frozenset((*self.columns, *ids))
        return ParquetFile(path, columns) if path.endswith(".parquet") else ArrowFile(path, columns)

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
        for row in dataclasses.replace(self, columns=()):
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
