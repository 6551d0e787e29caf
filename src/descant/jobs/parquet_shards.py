"""Shards in Parquet: one schema for all shards of a job."""

from __future__ import annotations

import io
import json
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


class ParquetShards:
    """Results in Parquet files with the same columns.

    `row` is an integer and `completions` a list of structs. The columns between them are texts: a text is
    itself, another value its JSON, and null stands for no value, so that the schema does not depend on rows.
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
        return file.getvalue()

    def read(self, path: str) -> Iterator[dict[str, Any]]:
        """The records of a file; fields of completions that are optional and null are left out."""
        reader = load_pyarrow().parquet.ParquetFile(path)
        with reader:
            for batch in reader.iter_batches(1024, use_threads=False):
                for record in batch.to_pylist():
                    yield {**record, "completions": [_present(one) for one in record["completions"]]}


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
