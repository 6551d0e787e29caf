"""Shards are complete or computed again: torn files, full disks, and both formats of results."""

from __future__ import annotations

import errno
import io
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from descant import InputError, MissingExtra
from descant.jobs.shards import JobManifest, ShardCheck, ShardFolder

FORMATS = ("jsonl", "parquet")
ROWS, SHARD_ROWS = 20, 6
FAILED = {3, 7, 8, 18, 19}  # all rows of the last shard
SHARDS = range(4)


def record(row: int) -> dict[str, Any]:
    """What a row has in the output."""
    if row in FAILED:
        return {"row": row, "id": f"k{row}", "error": f"no, {row} é"}
    completions = [
        {"text": f" {row} ship\n" * (row + n), "tokens": row, "finish_reason": "stop"} for n in (0, 1)
    ]
    return {"row": row, "id": f"k{row}", "name": f"é {row}", "completions": completions}


def open_shards(path: Path, sink_format: str) -> ShardFolder:
    manifest = JobManifest("1", "a", "b", ROWS, SHARD_ROWS, sink_format)
    return ShardFolder(str(path), manifest, ("id", "name"))


def write_shards(folder: ShardFolder, shards: Any = SHARDS) -> None:
    """What a run does."""
    with folder.open():
        for shard in shards:
            rows = [record(row) for row in folder.manifest.rows_of(shard)]
            results = [one for one in rows if "error" not in one]
            folder.write(shard, results, [one for one in rows if "error" in one])


@pytest.fixture(params=FORMATS)
def sink_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, sink_format: str) -> ShardFolder:
    """All shards of a job."""
    found = open_shards(tmp_path / "sink", sink_format)
    write_shards(found)
    return found


# ------------------------------------------------------------------------ formats
def test_records_are_read_back(folder: ShardFolder) -> None:
    results = [one for shard in SHARDS for one in folder.read_results(shard)]
    errors = [one for shard in SHARDS for one in folder.read_errors(shard)]
    assert sorted([*results, *errors], key=lambda one: one["row"]) == [record(row) for row in range(ROWS)]
    assert [one["row"] for one in errors] == sorted(FAILED)
    assert folder.check_shards() == ShardCheck([], len(FAILED), [])


def test_parquet_has_one_schema_and_the_same_bytes(tmp_path: Path, contents: Any) -> None:
    folders = [open_shards(tmp_path / name, "parquet") for name in ("a", "b")]
    for one in folders:
        write_shards(one)
    assert contents(str(folders[0].path)) == contents(str(folders[1].path))
    found = folders[0]
    schemas = [pq.read_schema(found.results_file(shard)) for shard in SHARDS]
    assert all(one.equals(schemas[0], check_metadata=False) for one in schemas)
    assert str(schemas[0].field("completions").type) == (
        "list<element: struct<text: string, tokens: int64, finish_reason: string, score: double,"
        " answer: string, votes: int64>>"
    )
    assert [pq.read_metadata(found.results_file(shard)).num_rows for shard in SHARDS] == [5, 4, 6, 0]


def test_parquet_keeps_any_value_of_a_column_as_text(tmp_path: Path) -> None:
    manifest = JobManifest("1", "a", "b", 7, 10, "parquet")
    found = ShardFolder(str(tmp_path), manifest, ("id", "x", "x"))
    values: list[Any] = [None, "1", 1, 1.5, True, [1, {"é": None}], "a\ud800b"]
    scored = {
        "text": "\ud800",
        "tokens": 1,
        "finish_reason": "stop",
        "score": 0.5,
        "answer": "\udc00",
        "votes": 2,
    }
    rows = [{"row": row, "id": row, "x": x, "completions": [scored]} for row, x in enumerate(values)]
    del rows[0]["x"]
    found.write(0, rows, [])
    table = list(found.read_results(0))
    assert [one["x"] for one in table] == [None, "1", "1", "1.5", "true", '[1, {"é": null}]', "a\ufffdb"]
    assert [one["id"] for one in table] == [str(row) for row in range(7)]
    assert table[0]["completions"] == [{**scored, "text": "\ufffd", "answer": "\ufffd"}]
    assert found.check_shards().missing == []
    for wrong in ({**rows[0], "y": 1}, {**rows[0], "completions": [{**scored, "z": 1}]}):
        with pytest.raises(ValueError, match=r"has no column for [yz]"):
            ShardFolder(str(tmp_path / "other"), manifest, ("id", "x")).write(0, [wrong], [])


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    open_shards(tmp_path, "jsonl")
    with pytest.raises(MissingExtra, match=r"pip install descant\[parquet\]"):
        open_shards(tmp_path, "parquet")


# ------------------------------------------------------------------------ torn files
def shard_of(path: Path) -> int:
    return int(path.name[6:11])


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def fill(data: bytes, rng: random.Random) -> bytes:
    """Zeros in some part of a file, often up to its end."""
    start = rng.randrange(len(data))
    end = len(data) if rng.random() < 0.5 else rng.randint(start + 1, len(data))
    return data[:start] + bytes(end - start) + data[end:]


@pytest.mark.parametrize("damage", [cut, fill])
def test_a_torn_shard_is_missing_until_it_is_written_again(
    folder: ShardFolder, damage: Callable[[bytes, random.Random], bytes], contents: Any
) -> None:
    rng, whole, points = random.Random(0), contents(str(folder.path)), 0
    while points < 200:
        path = folder.path / rng.choice([name for name in sorted(whole) if name.startswith("shard")])
        if not whole[path.name]:
            continue  # results of a shard in which all rows failed
        torn = damage(whole[path.name], rng)
        if torn == whole[path.name]:
            continue  # there were zeros already
        path.write_bytes(torn)
        assert folder.check_shards().missing == [shard_of(path)], (path.name, len(torn))
        write_shards(folder, folder.check_shards().missing)
        assert contents(str(folder.path)) == whole
        points += 1


def test_a_file_that_is_gone_or_has_more_rows_is_noticed(folder: ShardFolder) -> None:
    folder.errors_file(0).unlink()
    folder.results_file(1).unlink()
    folder.errors_file(2).write_text("{}\n")
    assert folder.check_shards() == ShardCheck([0, 1, 2], 2, [0, 2])
    write_shards(folder, [0, 1, 2])
    assert folder.check_shards() == ShardCheck([], len(FAILED), [])


# ------------------------------------------------------------------------ full disks
class FullDisk:
    """Fails at the k-th call that takes space, and at all later ones if it `lasts`."""

    def __init__(self, call: int, lasts: bool) -> None:
        self.call, self.lasts, self.calls = call, lasts, 0

    def check(self) -> None:
        self.calls += 1
        if self.calls == self.call or (self.lasts and self.calls > self.call):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("open", "fsync", "link", "replace"):
            patch.setattr(os, name, self._checked(getattr(os, name)))
        patch.setattr(os, "fdopen", lambda descriptor, _: io.BufferedRandom(self._file(descriptor)))

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.check()
            return function(*arguments, **options)

        return call

    def _file(self, descriptor: int) -> io.FileIO:
        disk = self

        class Writes(io.FileIO):
            def write(self, data: Any) -> int:
                try:
                    disk.check()
                except OSError:
                    super().write(bytes(data)[: len(data) // 2])  # a part still fits
                    raise
                return super().write(data)

        return Writes(descriptor, "r+")


def files_of(folder: ShardFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()} if folder.path.exists() else {}


def write_on(disk: FullDisk, write: Callable[[ShardFolder], None], folder: ShardFolder) -> Exception | None:
    """The error of a write on a full disk."""
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        try:
            write(folder)
        except (OSError, InputError) as error:
            return error
    return None


def check_full_disk(
    prepare: Callable[[Path], ShardFolder], write: Callable[[ShardFolder], None], tmp_path: Path, lasts: bool
) -> int:
    """Fail at each call of a write in turn; returns at how many an error was raised."""
    whole = prepare(tmp_path / "whole")
    write(whole)
    expected, raised = files_of(whole), 0
    for call in range(1, 100):
        folder, disk = prepare(tmp_path / f"sink{call}"), FullDisk(call, lasts)
        before, missing = files_of(folder), folder.check_shards().missing
        error = write_on(disk, write, folder)
        left = files_of(folder)
        if error is None:  # none of its calls, or the flush of a folder, which some systems do not have
            assert left == expected
        else:
            raised += 1
            assert "No space left" in str(error)
            for name, data in left.items():  # no other file, and none in part
                assert data in (expected.get(name), before.get(name)), name
            for shard in set(SHARDS) - set(folder.check_shards().missing):  # what is there has all its files
                for name in (folder.results_file(shard).name, folder.errors_file(shard).name):
                    assert left.get(name) == expected.get(name)
            assert set(folder.check_shards().missing) <= set(missing)
        write(folder)
        assert files_of(folder) == expected
        if disk.calls < call:
            return raised
    raise AssertionError("every call failed")


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_a_full_disk_leaves_no_shard_in_part(
    tmp_path: Path, sink_format: str, lasts: bool, torn: bool
) -> None:
    def prepare(path: Path) -> ShardFolder:
        folder = open_shards(path, sink_format)
        write_shards(folder, [0, 1] if torn else [0])
        if torn:
            folder.results_file(1).write_bytes(folder.results_file(1).read_bytes()[:20])
            folder.errors_file(1).write_bytes(b"\0" * 10)
        return folder

    def write(folder: ShardFolder) -> None:
        rows = [record(row) for row in folder.manifest.rows_of(1)]
        results = [one for one in rows if "error" not in one]
        folder.write(1, results, [one for one in rows if "error" in one])

    assert check_full_disk(prepare, write, tmp_path, lasts) >= 8


@pytest.mark.parametrize("lasts", [False, True])
def test_a_full_disk_leaves_no_manifest_in_part(tmp_path: Path, sink_format: str, lasts: bool) -> None:
    def write(folder: ShardFolder) -> None:
        with folder.open():
            pass

    assert check_full_disk(lambda path: open_shards(path, sink_format), write, tmp_path, lasts) >= 4


def test_the_order_of_the_names_is_that_of_the_shards() -> None:
    few, many = (JobManifest("1", "a", "b", rows, 1) for rows in (100_000, 1_000_001))
    assert (few.name_of(7), few.name_of(99_999)) == ("shard-00007", "shard-99999")
    assert (many.name_of(7), many.name_of(1_000_000)) == ("shard-0000007", "shard-1000000")
