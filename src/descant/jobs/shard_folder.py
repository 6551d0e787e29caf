"""The sink of a job: a folder of shards, each whole or absent, and a manifest of the job they belong to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from descant.core.atomic_file import lock_file, remove_leftovers, write_bytes, write_new
from descant.errors import InputError
from descant.jobs.parquet_shards import ParquetShards
from descant.jobs.shard_formats import JsonLinesShards, ShardFormat, ShardRecord

__all__ = ["SINK_FORMATS", "JobManifest", "ShardCheck", "ShardFolder"]

MANIFEST: Final = "manifest.json"
SINK_FORMATS: Final = ("jsonl", "parquet")
_FORMAT: Final = 1
_MIN_DIGITS: Final = 5
_ADVICE: Final = "give another folder, or remove this one to start anew"


@dataclass(frozen=True)
class JobManifest:
    """What the shards of a folder belong to; a run with any other value is refused."""

    descant: str  # the version
    job: str  # digest of the model and of everything that decides the results
    source: str  # digest of the source's files
    rows: int
    shard_rows: int
    sink_format: str = "jsonl"
    format: int = _FORMAT

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """The indices of a shard's rows."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.rows))

    def name_of(self, shard: int) -> str:
        """The start of the names of a shard's files; the order of the names is that of the shards."""
        return f"shard-{shard:0{max(_MIN_DIGITS, len(str(self.shards - 1)))}}"


class ShardCheck(NamedTuple):
    """What a look at all shards has found."""

    missing: list[int]  # shards that are not there, or not whole
    failed_rows: int  # without a result, in the others


class ShardFolder:
    """The shards of one job in a folder.

    `shard-00000.jsonl` (or `.parquet`) holds the results of a shard in the order of its rows, and
    `shard-00000.errors.jsonl`, where there are any, its rows without a result. The first is written last: a
    shard is complete if it is there and both have all rows of the shard.
    """

    def __init__(self, path: str, manifest: JobManifest, columns: Sequence[str] = ()) -> None:
        """`columns`: what results have between `row` and `completions`, for formats with a schema."""
        self.path, self.manifest = Path(path), manifest
        self._errors = JsonLinesShards()
        is_parquet = manifest.sink_format == "parquet"
        self.results_format: ShardFormat = ParquetShards(columns) if is_parquet else self._errors

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Create the folder or take it over from an earlier run; no other run may use it meanwhile."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            must = f"must be a folder that can be written ({error.strerror})"
            raise InputError("sink", must, str(self.path)) from None
        try:
            if lock_file(descriptor) is False:
                raise InputError(
                    "sink", "must not be in use by another run", str(self.path), "wait for its end"
                )
            remove_leftovers(self.path)
            if not self.check():
                write_bytes(
                    self.path / MANIFEST, (json.dumps(asdict(self.manifest), indent=1) + "\n").encode()
                )
            yield
        finally:
            os.close(descriptor)

    def check(self) -> bool:
        """Whether the folder has this job's manifest; raises InputError for a folder of anything else."""
        try:
            found: Any = json.loads((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            if self.path.is_dir() and any(self.path.glob("shard-*")):
                must = f"must be new, or have a {MANIFEST} beside its shards"
                raise InputError("sink", must, str(self.path), _ADVICE) from None
            return False
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                "sink", f"must have a readable {MANIFEST} ({error})", str(self.path), _ADVICE
            ) from None
        wanted = asdict(self.manifest)
        others = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        if others:
            must = (
                f"must be new, or hold shards of the same job (`{'`, `'.join(others)}` differ in {MANIFEST})"
            )
            raise InputError("sink", must, str(self.path), _ADVICE)
        return True

    def check_shards(self, shards: Iterable[int] | None = None) -> ShardCheck:
        """Read some shards, by default all, and find those that do not have all their rows."""
        missing, failed = [], 0
        for shard in range(self.manifest.shards) if shards is None else shards:
            errors = self._failed_rows(shard)
            if errors is None:
                missing.append(shard)
            else:
                failed += errors
        return ShardCheck(missing, failed)

    def is_complete(self, shard: int) -> bool:
        """Whether a shard has all its rows."""
        return self._failed_rows(shard) is not None

    def _failed_rows(self, shard: int) -> int | None:
        """The rows of a shard without a result; None: it is not complete."""
        results = _count(self.results_format, self.results_file(shard), absent=None)
        if results is None:
            return None
        errors = _count(self._errors, self.errors_file(shard), absent=0)
        return (
            errors if errors is not None and results + errors == len(self.manifest.rows_of(shard)) else None
        )

    def write(self, shard: int, results: Sequence[ShardRecord], errors: Sequence[ShardRecord]) -> None:
        """Write a complete shard: first its errors, then its results."""
        if self.is_complete(shard):  # by a worker that was taken for dead: it has written the same bytes
            return
        data = self.results_format.encode(results)
        # What is there is not whole, and must not seem so beside other errors.
        self.results_file(shard).unlink(missing_ok=True)
        if errors:
            write_new(self.errors_file(shard), self._errors.encode(errors))
        else:  # of a run that was killed between the two files
            self.errors_file(shard).unlink(missing_ok=True)
        write_new(self.results_file(shard), data)

    def read_results(self, shard: int) -> Iterator[dict[str, Any]]:
        """The results of a complete shard, in the order of its rows."""
        return self.results_format.read(str(self.results_file(shard)))

    def read_errors(self, shard: int) -> Iterator[dict[str, Any]]:
        """The rows without a result of a complete shard, in their order."""
        path = self.errors_file(shard)
        return self._errors.read(str(path)) if path.exists() else iter(())

    def results_file(self, shard: int) -> Path:
        """The file of a shard's results."""
        return self.path / f"{self.manifest.name_of(shard)}{self.results_format.suffix}"

    def errors_file(self, shard: int) -> Path:
        """The file of a shard's rows without a result."""
        return self.path / f"{self.manifest.name_of(shard)}.errors.jsonl"


def _count(shards: ShardFormat, path: Path, absent: int | None) -> int | None:
    """The records of a file; None: it is not whole."""
    try:
        return shards.count(str(path))
    except FileNotFoundError:
        return absent
