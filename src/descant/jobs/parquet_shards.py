"""Shards in Parquet: one schema for all shards of a job, and a checksum of each file in its footer."""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, Final

from descant.jobs.arrow_library import load_pyarrow
from descant.jobs.shard_formats import ShardRecord

__all__ = ["ParquetShards"]

# In the order of the columns, with the names of Arrow's types. The last three are optional.
COMPLETION_FIELDS: Final = {
    "text": "string",
    "tokens": "int64",
    "finish_reason": "string",
    "score": "float64",
    "answer": "string",
    "votes": "int64",
}
_TEXTS: Final = tuple(name for name, kind in COMPLETION_FIELDS.items() if kind == "string")
_OPTIONAL: Final = frozenset({"score", "answer", "votes"})
_KEY: Final = b"descant.shard"
_NO_CHECKSUM: Final = b"0" * 8
# In the footer a key is followed by two bytes, the kind and the length of its value.
_MARK: Final = re.compile(re.escape(_KEY) + rb"..rows=(\d+) crc32=([0-9a-f]{8})", re.DOTALL)


class ParquetShards:
    """Results in Parquet files with the same columns.

    `row` is an integer and `completions` a list of structs. The columns between them are texts: a text is
    itself, another value its JSON, and null stands for no value, so that the schema does not depend on rows.
    The footer has the number of rows and a checksum of all other bytes under the key `descant.shard`.
    """

    suffix: ClassVar[str] = ".parquet"

    def __init__(self, columns: Sequence[str]) -> None:
        pyarrow = load_pyarrow()
        self._columns = tuple(dict.fromkeys(columns))
        fields = [(name, getattr(pyarrow, kind)()) for name, kind in COMPLETION_FIELDS.items()]
        self._schema = pyarrow.schema(
            [
                pyarrow.field("row", pyarrow.int64(), nullable=False),
                *((name, pyarrow.string()) for name in self._columns),
                ("completions", pyarrow.list_(pyarrow.struct(fields))),
            ]
        )

    def encode(self, records: Sequence[ShardRecord]) -> bytes:
        """The file of some records."""
        pyarrow = load_pyarrow()
        for one in records:
            _check_names(one, ("row", *self._columns, "completions"))
        texts = [[_as_text(one.get(name)) for one in records] for name in self._columns]
        values = [[one["row"] for one in records], *texts, [_completions(one) for one in records]]
        arrays = [pyarrow.array(value, field.type) for value, field in zip(values, self._schema, strict=True)]
        table = pyarrow.Table.from_arrays(arrays, schema=self._schema)
        file = io.BytesIO()
        with pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd") as writer:
            writer.write_table(table, max(1, len(records)))
            value = b"rows=%d crc32=%s" % (len(records), _NO_CHECKSUM)
            writer.add_key_value_metadata({_KEY: value})
        return _with_checksum(file.getvalue())

    def read(self, path: str) -> Iterator[dict[str, Any]]:
        """The records of a file; fields of completions that are optional and null are left out."""
        reader = load_pyarrow().parquet.ParquetFile(path)
        with reader:
            for batch in reader.iter_batches(1024, use_threads=False):
                for record in batch.to_pylist():
                    yield {**record, "completions": [_present(one) for one in record["completions"]]}

    def count(self, path: str) -> int | None:
        """The number of rows; None for a file whose bytes are not those that were written."""
        with open(path, "rb", buffering=0) as file:
            data = file.readall()
        mark = _MARK.match(data, max(0, data.rfind(_KEY)))
        return int(mark[1]) if mark is not None and int(mark[2], 16) == _checksum(data, mark) else None


def _with_checksum(data: bytes) -> bytes:
    """A file with its checksum in place of zeros."""
    mark = _MARK.match(data, max(0, data.rfind(_KEY)))
    if mark is None:
        raise RuntimeError(f"the library wrote a footer without the key {_KEY.decode()}")
    return data[: mark.start(2)] + b"%08x" % _checksum(data, mark) + data[mark.end(2) :]


def _checksum(data: bytes, mark: re.Match[bytes]) -> int:
    """The checksum of a file in which zeros stand for the checksum."""
    view = memoryview(data)
    before = zlib.crc32(_NO_CHECKSUM, zlib.crc32(view[: mark.start(2)]))
    return zlib.crc32(view[mark.end(2) :], before)


def _as_text(value: Any) -> str | None:
    """The value of a kept column, or an id."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair is no text in Parquet.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _completions(record: ShardRecord) -> list[dict[str, Any]]:
    """The completions of a record, with texts that Parquet can hold."""
    completions = []
    for one in record["completions"]:
        _check_names(one, COMPLETION_FIELDS)
        texts = {name: _as_text(one[name]) for name in _TEXTS if name in one}
        completions.append({**one, **texts})
    return completions


def _check_names(record: ShardRecord, known: Collection[str]) -> None:
    """Raise ValueError for a name that has no column: its value would be lost."""
    if unknown := [name for name in record if name not in known]:
        raise ValueError(f"the schema of the shards has no column for {', '.join(unknown)}")


def _present(completion: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in completion.items() if value is not None or name not in _OPTIONAL}
