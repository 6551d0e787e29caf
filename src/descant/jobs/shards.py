"""The sink of a job: a folder of shards, each whole or absent, and a manifest of what they belong to.

`manifest.json` says which job the shards are of, `manifest.source` has the digests of the source by blocks,
and `manifest.shards` has 16 bytes for each shard: the digest of its files, of its place, and of the job. A
writer notes a digest before it writes the files, so a shard is complete where both agree, whenever a process
was killed, and every other file in the place of a shard is noticed.

A folder of unique shards has the rows of different texts: of rows whose first completion has the same text,
only the first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from descant.api.json_lines import format_line
from descant.core.atomic_file import lock_file, remove_leftovers, write_bytes, write_new
from descant.errors import InputError
from descant.jobs.source import RowPosition, RowPositions
from descant.jobs.source_files import DIGEST_BYTES, content_digest, load_pyarrow

ShardRecord = Mapping[str, Any]  # a row's result or its error


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
        pyarrow, file = load_pyarrow(), io.BytesIO()
        table = pyarrow.Table.from_pylist([self._row(record) for record in records], schema=self._schema)
        size = max(1, len(records))
        pyarrow.parquet.write_table(table, file, compression="zstd", row_group_size=size)
        return file.getvalue()

    def read(self, path: str) -> Iterator[dict[str, Any]]:
        """The records of a file; fields of completions that are optional and null are left out."""
        reader = load_pyarrow().parquet.ParquetFile(path)
        with reader:
            for batch in reader.iter_batches(1024, use_threads=False):
                for record in batch.to_pylist():
                    yield {**record, "completions": list(map(_present, record["completions"]))}

    def _row(self, record: ShardRecord) -> dict[str, Any]:
        """A record with texts that Parquet can hold."""
        _check_names(record, self._schema.names)
        completions = []
        for completion in record["completions"]:
            _check_names(completion, COMPLETION_FIELDS)
            texts = {name: _as_text(completion[name]) for name in _TEXTS if name in completion}
            completions.append({**completion, **texts})
        texts = {name: _as_text(record.get(name)) for name in self._columns}
        return {"row": record["row"], **texts, "completions": completions}


def _as_text(value: Any) -> str | None:
    """The value of a kept column, or an id."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair is no text in Parquet.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _check_names(record: ShardRecord, known: Collection[str]) -> None:
    """Raise ValueError for a name that has no column: its value would be lost."""
    if unknown := [name for name in record if name not in known]:
        raise ValueError(f"the schema of the shards has no column for {', '.join(unknown)}")


def _present(completion: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in completion.items() if value is not None or name not in _OPTIONAL}


ShardFormat = JsonLinesShards | ParquetShards
MANIFEST: Final = "manifest.json"
SOURCE_DIGESTS: Final = "manifest.source"
SHARD_DIGESTS: Final = "manifest.shards"
ATTEMPTS_FOLDER: Final = ".attempts"
SINK_FORMATS: Final = ("jsonl", "parquet")
_FORMAT: Final = 2
_MIN_DIGITS: Final = 5
# Each write goes to the disk on its own: on NFS others may write digests beside it.
_WRITE: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_DSYNC", 0) | getattr(os, "O_BINARY", 0)
_ADVICE: Final = "give another folder, or remove this one to start anew"


@dataclass(frozen=True)
class JobManifest:
    """The job and source of the shards in a folder; a run with any other value is refused."""

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
    """The result of a look at all shards."""

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
            raise self._error(f"must be a folder that can be written ({error.strerror})", "") from None
        try:
            if lock_file(descriptor) is False:
                raise self._error("must not be in use by another run", "wait for its end")
            remove_leftovers(self.path)
            if not self.check():
                text = json.dumps(asdict(self.manifest), indent=1) + "\n"
                write_bytes(self.path / MANIFEST, text.encode())
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
                raise self._error(f"must be new, or have a {MANIFEST} beside its shards") from None
            return False
        except (OSError, ValueError, RecursionError) as error:
            raise self._error(f"must have a readable {MANIFEST} ({error})") from None
        wanted = asdict(self.manifest)
        others = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        if others:
            differing = f"`{'`, `'.join(others)}` differ in {MANIFEST}"
            raise self._error(f"must be new, or hold shards of the same job ({differing})")
        self._check_names()
        return True

    def read_identity(self) -> str:
        """Which shards the folder has: of what job, and with which contents."""
        return self._identity.decode() + self._read_digests(0, self.manifest.shards).hex()

    def read_source(self) -> bytes:
        """The encoded content of the source."""
        found = _read_or_none(self.path / SOURCE_DIGESTS)
        if found is None or content_digest(found).hex() != self.manifest.source:
            raise self._error(f"must have the {SOURCE_DIGESTS} of its run", "")
        return found

    def _error(self, must: str, do: str = _ADVICE) -> InputError:
        return InputError("sink", must, str(self.path), do)

    def _check_names(self) -> None:
        """Raise InputError for shards without digests, and for those of no row."""
        names = [path.name for path in self.path.glob("shard-*")]
        if names and not (self.path / SHARD_DIGESTS).exists():
            raise self._error(f"must have {SHARD_DIGESTS} beside its shards", f"restore it, {_ADVICE}")
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
            start = (shard - shards[0]) * DIGEST_BYTES
            digest = noted[start : start + DIGEST_BYTES]
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
        self._note_digest(shard, self._digest(shard, content_digest(data), errors_data))
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
        return content_digest(b"%s %d %s%s" % (self._identity, shard, results, content_digest(errors)))

    def _read_digests(self, first: int, stop: int) -> bytes:
        """The digests that were noted for some shards; zeros, or nothing at the end, for those without."""
        try:
            with open(self.path / SHARD_DIGESTS, "rb", buffering=0) as file:
                file.seek(first * DIGEST_BYTES)
                return file.read((stop - first) * DIGEST_BYTES)
        except FileNotFoundError:
            return b""

    def _note_digest(self, shard: int, digest: bytes) -> None:
        descriptor = os.open(self.path / SHARD_DIGESTS, _WRITE, 0o666)
        try:
            os.lseek(descriptor, shard * DIGEST_BYTES, os.SEEK_SET)
            if os.write(descriptor, digest) < DIGEST_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _file_digest(path: Path) -> bytes | None:
    """The digest of a file's bytes; None: there is no file."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).digest()
    except FileNotFoundError:
        return None


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


# The rows of the next group start when the last ones of a group run, so that the engine has always enough.
GROUPS_AT_ONCE: Final = 2
_GROUPS_PER_WORKER = 4


class ShardGroup(NamedTuple):
    """Consecutive shards that one worker computes, and where their rows begin in the source."""

    first: int
    num_shards: int
    position: RowPosition

    @property
    def shards(self) -> range:
        """The shards."""
        return range(self.first, self.first + self.num_shards)


def group_shards(
    missing: Sequence[int],
    manifest: JobManifest,
    positions: RowPositions,
    max_rows: int,
    workers: int,
) -> Iterator[ShardGroup]:
    """The missing shards in groups of about `max_rows` rows, or fewer where some workers would have none."""
    share = -(-len(missing) // (workers * _GROUPS_PER_WORKER)) if workers > 1 else len(missing)
    size = max(1, min(-(-max_rows // manifest.shard_rows), share))
    start = 0
    while start < len(missing):
        end = start + 1
        while end < len(missing) and end - start < size and missing[end] == missing[end - 1] + 1:
            end += 1
        first = missing[start]
        yield ShardGroup(first, end - start, positions[first])
        start = end


DEDUP_MODES: Final = ("exact", "normalized")
UNIQUE_MANIFEST: Final = "manifest.json"
MAX_DIGESTS: Final = 16_000_000  # in memory at once, about 100 bytes each


@dataclass(frozen=True)
class DedupCounts:
    """The rows with a result, and those of them that are kept."""

    rows: int
    unique: int


class UniqueRows:
    """Which rows are kept, by their position among the rows with a result: one bit of memory each."""

    def __init__(self, rows: int) -> None:
        self._bits = bytearray(-(-rows // 8))

    def add(self, position: int) -> None:
        """Keep a row."""
        self._bits[position >> 3] |= 1 << (position & 7)

    def __contains__(self, position: int) -> bool:
        return bool(self._bits[position >> 3] >> (position & 7) & 1)

    def count(self) -> int:
        """The number of rows that are kept."""
        return int.from_bytes(self._bits, "little").bit_count()


def find_unique_rows(
    read_texts: Callable[[], Iterable[str]], rows: int, mode: str, max_digests: int = MAX_DIGESTS
) -> UniqueRows:
    """The first row of each text; `read_texts` gives the texts of `rows` rows in order, once for each pass.

    Texts are equal if their digests of 16 bytes are. Where the rows exceed `max_digests`, each pass keeps the
    digests of one range in memory.
    """
    if mode not in DEDUP_MODES:
        raise InputError("dedup", f"must be one of {', '.join(DEDUP_MODES)}", mode)
    unique, passes = UniqueRows(rows), max(1, -(-rows // max_digests))
    for number in range(passes):
        found: set[bytes] = set()
        position = -1
        for position, text in enumerate(read_texts()):
            if position >= rows:
                continue
            digest = _text_digest(text, mode)
            if int.from_bytes(digest[:8], "little") * passes >> 64 == number and digest not in found:
                found.add(digest)
                unique.add(position)
        if position + 1 != rows:
            raise InputError("rows", f"must be the number of texts, which are {position + 1}", rows)
    return unique


@dataclass(frozen=True)
class UniqueShards:
    """The shards of a job, in their order, and the folder of those without rows of equal text."""

    shards: Sequence[Path]
    shard_format: ShardFormat
    folder: Path
    max_digests: int = MAX_DIGESTS

    def write(self, mode: str, identity: str) -> DedupCounts:
        """Write the kept rows of the shards to files of the same names.

        `identity` says which job the shards are of, such as the text of its manifest. The folder's own
        manifest is written last: where it has the same identity and mode, everything is there and nothing is
        done.
        """
        key = content_digest(json.dumps([identity, mode]).encode()).hex()
        names = [path.name for path in self.shards]
        done = _read_manifest(self.folder, key, self._digest(names))
        if done is not None:
            return done
        self.folder.mkdir(parents=True, exist_ok=True)
        # Until the last file is written, the folder does not say that it is complete.
        (self.folder / UNIQUE_MANIFEST).unlink(missing_ok=True)
        rows = sum(1 for _ in self._records())
        unique = find_unique_rows(lambda: map(first_text, self._records()), rows, mode, self.max_digests)
        start = 0
        for path in self.shards:
            start += self._write_kept(path, unique, start)
        for path in self.folder.glob("shard-*"):
            if path.name not in names:  # of an earlier job
                path.unlink()
        counts = DedupCounts(rows, unique.count())
        state = {"format": _FORMAT, "key": key, "mode": mode}
        manifest = {**state, **asdict(counts), "digest": self._digest(names)}
        write_bytes(self.folder / UNIQUE_MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        return counts

    def _records(self) -> Iterator[dict[str, Any]]:
        for path in self.shards:
            yield from self.shard_format.read(str(path))

    def _digest(self, names: Sequence[str]) -> str:
        """The digest of the files that were written; of one that is gone it is another."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name in names:
            with contextlib.suppress(FileNotFoundError), open(self.folder / name, "rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
        return found.hexdigest()

    def _write_kept(self, path: Path, unique: UniqueRows, start: int) -> int:
        """Copy the kept rows of a shard, whose first has the position `start`; returns the number of rows."""
        records = list(self.shard_format.read(str(path)))
        kept = [record for position, record in enumerate(records, start) if position in unique]
        write_bytes(self.folder / path.name, self.shard_format.encode(kept))
        return len(records)


def first_text(record: Any) -> str:
    """The text of the first completion of a result."""
    try:
        text = record["completions"][0]["text"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise InputError("completions", "must have a text in each result", record)
    return text


def _text_digest(text: str, mode: str) -> bytes:
    if mode == "normalized":
        text = " ".join(text.casefold().split())
    # A text of a model may have lone surrogates, which JSON can hold and UTF-8 cannot.
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"descant dedup").digest()


def _read_manifest(folder: Path, key: str, digest: str) -> DedupCounts | None:
    """The counts of a folder that is complete; None: it is not, or belongs to something else."""
    try:
        found: Any = json.loads((folder / UNIQUE_MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    wanted = {"format": _FORMAT, "key": key, "digest": digest}
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in wanted.items()):
        return None
    rows, unique = found.get("rows"), found.get("unique")
    return DedupCounts(rows, unique) if isinstance(rows, int) and isinstance(unique, int) else None
