"""Rows of different texts: of rows whose first completion has the same text, only the first is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from descant.core.atomic_file import write_bytes
from descant.errors import InputError
from descant.jobs.shards import ShardFormat

__all__ = ["DEDUP_MODES", "DedupCounts", "UniqueRows", "UniqueShards", "find_unique_rows"]

DEDUP_MODES: Final = ("exact", "normalized")
UNIQUE_MANIFEST: Final = "manifest.json"
MAX_DIGESTS: Final = 16_000_000  # in memory at once, about 100 bytes each
_DIGEST_BYTES: Final = 16
_FORMAT: Final = 2


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
    check_dedup_mode(mode)
    unique, passes = UniqueRows(rows), max(1, -(-rows // max_digests))
    for number in range(passes):
        found: set[bytes] = set()
        position = -1
        for position, text in enumerate(read_texts()):
            if position >= rows:
                continue
            digest = _digest(text, mode)
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
        check_dedup_mode(mode)
        key = hashlib.blake2b(json.dumps([identity, mode]).encode(), digest_size=16).hexdigest()
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
        found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
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


def check_dedup_mode(mode: Any) -> None:
    """Raise InputError for an unknown mode."""
    if mode not in DEDUP_MODES:
        raise InputError("dedup", f"must be one of {', '.join(DEDUP_MODES)}", mode)


def _digest(text: str, mode: str) -> bytes:
    if mode == "normalized":
        text = " ".join(text.casefold().split())
    # A text of a model may have lone surrogates, which JSON can hold and UTF-8 cannot.
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"descant dedup").digest()


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
