"""The formats of shards: how records become the bytes of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from descant.api.json_lines import format_line

__all__ = ["JsonLinesShards", "ShardFormat", "ShardRecord"]

ShardRecord = Mapping[str, Any]  # a row's result or its error


class ShardFormat(Protocol):
    """How the results of a shard are kept in a file."""

    @property
    def suffix(self) -> str:
        """How the names of files end."""

    def encode(self, records: Sequence[ShardRecord]) -> bytes:
        """The file of some records, the same bytes for the same records."""

    def read(self, path: str) -> Iterator[dict[str, Any]]:
        """The records of a file."""


class JsonLinesShards:
    """A record in each line."""

    suffix: ClassVar[str] = ".jsonl"

    def encode(self, records: Sequence[ShardRecord]) -> bytes:
        """The lines of some records."""
        return "".join(map(format_line, records)).encode()

    def read(self, path: str) -> Iterator[dict[str, Any]]:
        """The records of the lines."""
        with open(path, "rb") as file:
            for line in file:
                yield json.loads(line)
