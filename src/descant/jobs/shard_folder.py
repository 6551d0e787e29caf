"""The sink of a job: a folder of shards, each whole or absent, and a manifest of what they belong to.

`manifest.json` says which job the shards are of, `manifest.source` has the digests of the source by blocks,
and `manifest.shards` has 16 bytes for each shard: the digest of its files, of its place, and of the job. A
writer notes a digest before it writes the files, so a shard is complete where both agree, whenever a process
was killed, and every other file in the place of a shard is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from descant.core.atomic_file import lock_file, remove_leftovers, write_bytes, write_new
from descant.errors import InputError
from descant.jobs.parquet_shards import ParquetShards
from descant.jobs.shard_formats import JsonLinesShards, ShardFormat, ShardRecord

__all__ = ["SINK_FORMATS", "JobManifest", "ShardCheck", "ShardFolder", "source_digest"]

MANIFEST: Final = "manifest.json"
SOURCE_DIGESTS: Final = "manifest.source"
SHARD_DIGESTS: Final = "manifest.shards"
SINK_FORMATS: Final = ("jsonl", "parquet")
_FORMAT: Final = 2
_MIN_DIGITS: Final = 5
_DIGEST_BYTES: Final = 16
# Each write goes to the disk on its own: on NFS others may write digests beside it.
_WRITE: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_DSYNC", 0) | getattr(os, "O_BINARY", 0)
_ADVICE: Final = "give another folder, or remove this one to start anew"


@dataclass(frozen=True)
class JobManifest:
    """What the shards of a folder belong to; a run with any other value is refused."""

    descant: str  # the version
    job: str  # digest of the model and of everything that decides the results
    source: str  # digest of `manifest.source`
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

    missing: list[int]  # shards that are not there, or not as they were written
    failed_rows: int  # without a result, in the others
    damaged: list[int]  # the missing shards of which there are other files than were written


class ShardFolder:
    """The shards of one job in a folder.

    `shard-00000.jsonl` (or `.parquet`) holds the results of a shard in the order of its rows, and
    `shard-00000.errors.jsonl`, where there are any, its rows without a result. The first is written last.
    """

    def __init__(self, path: str, manifest: JobManifest, columns: Sequence[str] = ()) -> None:
        """`columns`: what results have between `row` and `completions`, for formats with a schema."""
        self.path, self.manifest = Path(path), manifest
        self._errors = JsonLinesShards()
        is_parquet = manifest.sink_format == "parquet"
        self.results_format: ShardFormat = ParquetShards(columns) if is_parquet else self._errors
        self._identity = json.dumps(asdict(manifest), sort_keys=True).encode()

    @contextlib.contextmanager
    def open(self, source: bytes = b"") -> Iterator[None]:
        """Create the folder or take it over from an earlier run; no other run may use it meanwhile.

        `source` is the encoded content of the source, for `read_source`.
        """
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
            if _read_or_none(self.path / SOURCE_DIGESTS) != source:
                write_bytes(self.path / SOURCE_DIGESTS, source)
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
        self._check_names()
        return True

    def read_identity(self) -> str:
        """Which shards the folder has: of what job, and with which contents."""
        return self._identity.decode() + self._read_digests(0, self.manifest.shards).hex()

    def read_source(self) -> bytes:
        """The encoded content of the source."""
        found = _read_or_none(self.path / SOURCE_DIGESTS)
        if found is None or source_digest(found) != self.manifest.source:
            raise InputError("sink", f"must have the {SOURCE_DIGESTS} of its run", str(self.path))
        return found

    def _check_names(self) -> None:
        """Raise InputError for shards without digests, and for those of no row."""
        names = [path.name for path in self.path.glob("shard-*")]
        if names and not (self.path / SHARD_DIGESTS).exists():
            must = f"must have {SHARD_DIGESTS} beside its shards"
            raise InputError("sink", must, str(self.path), f"restore it, {_ADVICE}")
        for name in names:
            number = name.removeprefix("shard-").partition(".")[0]
            if number.isdecimal() and int(number) >= self.manifest.shards:
                raise InputError("sink", "must have no shards after the last one", name, "remove it")

    def check_shards(self, shards: Sequence[int] | None = None) -> ShardCheck:
        """Read some shards, by default all, and find those that are not as they were written."""
        shards = range(self.manifest.shards) if shards is None else shards
        missing: list[int] = []
        damaged: list[int] = []
        failed = 0
        noted = self._read_digests(shards[0], shards[-1] + 1) if shards else b""
        for shard in shards:
            start = (shard - shards[0]) * _DIGEST_BYTES
            digest = noted[start : start + _DIGEST_BYTES]
            errors = _read_or_none(self.errors_file(shard)) or b""
            results = _file_digest(self.results_file(shard))
            if results is not None and self._digest(shard, results, errors) == digest:
                failed += errors.count(b"\n")
                continue
            missing.append(shard)
            # Errors alone are those of a writer that was killed, or of results that a user has removed.
            if results is not None:
                damaged.append(shard)
        return ShardCheck(missing, failed, damaged)

    def write(self, shard: int, results: Sequence[ShardRecord], errors: Sequence[ShardRecord]) -> None:
        """Write a complete shard: its digest, then its errors, then its results."""
        if not self.check_shards([shard]).missing:  # by a worker that was taken for dead
            return
        data, errors_data = self.results_format.encode(results), self._errors.encode(errors)
        self._note_digest(shard, self._digest(shard, _digest(data), errors_data))
        if errors:
            write_new(self.errors_file(shard), errors_data)
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

    # -------------------------------------------------------------------- digests
    def _digest(self, shard: int, results: bytes, errors: bytes) -> bytes:
        """The digest of a shard by that of its results."""
        return _digest(b"%s %d %s%s" % (self._identity, shard, results, _digest(errors)))

    def _read_digests(self, first: int, stop: int) -> bytes:
        """The digests that were noted for some shards; zeros, or nothing at the end, for those without."""
        try:
            with open(self.path / SHARD_DIGESTS, "rb", buffering=0) as file:
                file.seek(first * _DIGEST_BYTES)
                return file.read((stop - first) * _DIGEST_BYTES)
        except FileNotFoundError:
            return b""

    def _note_digest(self, shard: int, digest: bytes) -> None:
        descriptor = os.open(self.path / SHARD_DIGESTS, _WRITE, 0o666)
        try:
            os.lseek(descriptor, shard * _DIGEST_BYTES, os.SEEK_SET)
            if os.write(descriptor, digest) < _DIGEST_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def source_digest(source: bytes) -> str:
    """The digest of the encoded content of a source."""
    return _digest(source).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _file_digest(path: Path) -> bytes | None:
    """The digest of a file's bytes; None: there is no file."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).digest()
    except FileNotFoundError:
        return None


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
