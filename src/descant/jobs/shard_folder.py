"""The sink of a job: a folder of shards, each whole or absent, and a manifest of the job they belong to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from descant.api.json_lines import format_line
from descant.core.atomic_file import lock_file, write_bytes
from descant.errors import InputError

__all__ = ["FolderStatus", "JobManifest", "ShardFolder"]

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_ADVICE: Final = "give another folder, or remove this one to start anew"


@dataclass(frozen=True)
class JobManifest:
    """What the shards of a folder belong to; a run with any other value is refused."""

    descant: str  # the version
    job: str  # digest of the model and of everything that decides the results
    source: str  # digest of the source's files
    rows: int
    shard_rows: int
    format: int = _FORMAT

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """The indices of a shard's rows."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.rows))


class FolderStatus(NamedTuple):
    """The shards that are missing, and the rows without a result in the others."""

    missing: list[int]
    failed_rows: int


class ShardFolder:
    """The shards of one job in a folder.

    `shard-00000.jsonl` holds the results of a shard in the order of its rows, and `shard-00000.errors.jsonl`,
    where there are any, its rows without a result. The first is written last: it is there if and only if the
    shard is complete.
    """

    def __init__(self, path: str, manifest: JobManifest) -> None:
        self.path, self.manifest = Path(path), manifest

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

    def status(self) -> FolderStatus:
        """What is there and what is missing."""
        missing = [shard for shard in range(self.manifest.shards) if not self.is_complete(shard)]
        done = set(range(self.manifest.shards)) - set(missing)
        files = [self.errors_file(shard) for shard in done]
        return FolderStatus(missing, sum(file.read_bytes().count(b"\n") for file in files if file.exists()))

    def is_complete(self, shard: int) -> bool:
        """Whether a shard is there."""
        return self.results_file(shard).exists()

    def write(
        self, shard: int, results: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write a complete shard: first its errors, then its results."""
        if errors:
            write_bytes(self.errors_file(shard), "".join(map(format_line, errors)).encode())
        else:  # of a run that was killed between the two files
            self.errors_file(shard).unlink(missing_ok=True)
        write_bytes(self.results_file(shard), "".join(map(format_line, results)).encode())

    def results_file(self, shard: int) -> Path:
        """The file of a shard's results."""
        return self.path / f"shard-{shard:05}.jsonl"

    def errors_file(self, shard: int) -> Path:
        """The file of a shard's rows without a result."""
        return self.path / f"shard-{shard:05}.errors.jsonl"
