"""The rows of a job's source: its files, one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from descant.errors import InputError
from descant.jobs.source_files import (
    ArrowFile,
    CsvFile,
    JsonLinesFile,
    RowData,
    RowFile,
    SourceContent,
    SourceFile,
)


class RowPosition(NamedTuple):
    """A place in a source from which rows can be read."""

    file: int  # its index among the files of the source
    offset: int  # in bytes; the row group in Parquet, the record batch in Arrow files
    skip: int = 0  # rows from there on that come before it


class RowPositions:
    """Positions in the order of the source, 24 bytes for each."""

    def __init__(self) -> None:
        self._values = array("Q")

    def append(self, position: RowPosition) -> None:
        """Add a position."""
        self._values.extend(position)

    def __len__(self) -> int:
        return len(self._values) // 3

    def __getitem__(self, index: int) -> RowPosition:
        start = 3 * range(len(self))[index]
        return RowPosition(*self._values[start : start + 3])

    def __iter__(self) -> Iterator[RowPosition]:
        return (self[index] for index in range(len(self)))


RowId = int | str
_GROUP: Final = 2**20  # digests that are looked for in one pass over the source


def id_digest(row_id: RowId) -> int:
    """A number of 64 bits, which tells the id 1 from the id "1"."""
    kind = b"i" if isinstance(row_id, int) else b"s"
    text = str(row_id).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(kind + text, digest_size=8).digest(), "big")


class IdDigests:
    """The digests of all ids of a source, 8 bytes for each."""

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, row_id: RowId) -> None:
        """Add the digest of an id."""
        self._digests.append(id_digest(row_id))

    def repeated(self) -> Iterator[frozenset[int]]:
        """The digests that were added more than once, in groups that fit into memory."""
        digests = np.frombuffer(self._digests, np.uint64)
        digests.sort()  # in place
        again = np.unique(digests[1:][digests[1:] == digests[:-1]])
        for start in range(0, len(again), _GROUP):
            yield frozenset(again[start : start + _GROUP].tolist())


_STATE: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"


def dataset_files(folder: str) -> list[str]:
    """The files of a dataset in their order; raises InputError for a folder of anything else."""
    if os.path.exists(os.path.join(folder, _SPLITS)):
        splits = _read(folder, _SPLITS).get("splits")
        folders = [os.path.join(folder, str(split)) for split in splits] if isinstance(splits, list) else []
        advice = f"give {' or '.join(folders)}" if folders else "give the folder of one"
        raise InputError("source", "must be one split of a dataset", folder, advice)
    files = _read(folder, _STATE).get("_data_files")
    listed = files if isinstance(files, list) else [None]  # a dataset without rows has no files
    names = [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in listed]
    # Only names: a state from elsewhere must not lead out of its folder.
    if not all(name.endswith(".arrow") and name == os.path.basename(name) for name in names):
        raise InputError("source", f"must have the names of its files in {_STATE}", folder)
    return [os.path.join(folder, name) for name in names]


def _read(folder: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            found = json.load(file)
        if isinstance(found, dict):
            return found
        problem = f"{name} is no object"
    except FileNotFoundError:
        problem = f"without {name}"
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{name}: {error}"
    must = f"must be a file, or a folder that `Dataset.save_to_disk` wrote ({problem})"
    raise InputError("source", must, folder)


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
        return ArrowFile(file, None if self.columns is None else frozenset((*self.columns, *ids)))

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
