"""Rows of different texts: exact and normalized, in several passes, restarted, and through Parquet's door."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descant import InputError
from descant.api.json_lines import format_line
from descant.core import atomic_file
from descant.jobs import shards as shards_module
from descant.jobs.shards import DedupCounts, JsonLinesShards, UniqueShards, find_unique_rows


def write_unique_shards(shards, folder, mode, identity, **limits):
    """The counts of shards of JSON lines."""
    return UniqueShards(shards, JsonLinesShards(), folder, **limits).write(mode, identity)


TEXTS = ["a", "b", "a", "A", " b", "c\n", "b", "c", "", "é", "É", "a", "\ud800", "\ud800", "x  y", "x y"]


def shards_of(folder: Path, texts: list[str], size: int = 5) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for start in range(0, len(texts), size):
        path = folder / f"shard-{start // size:05}.jsonl"
        lines = [
            format_line({"row": row, "completions": [{"text": text}, {"text": "other"}]})
            for row, text in enumerate(texts[start : start + size], start)
        ]
        path.write_text("".join(lines), encoding="utf-8")
        paths.append(path)
    return paths


def kept_rows(folder: Path) -> list[int]:
    paths = sorted(folder.glob("shard-*.jsonl"))
    return [json.loads(line)["row"] for path in paths for line in path.read_text().splitlines()]


def first_of(texts: list[str], equal: Callable[[str], Any]) -> list[int]:
    first: dict[Any, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(equal(text), row)
    return sorted(first.values())


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


@pytest.mark.parametrize(("mode", "equal"), [("exact", str), ("normalized", normal)])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_the_first_row_of_each_text_is_kept(tmp_path, mode, equal, limit) -> None:
    shards = shards_of(tmp_path, TEXTS)
    counts = write_unique_shards(shards, tmp_path / "unique", mode, "job", max_digests=limit)
    expected = first_of(TEXTS, equal)
    assert kept_rows(tmp_path / "unique") == expected
    assert counts == DedupCounts(len(TEXTS), len(expected))
    names = {path.name for path in (tmp_path / "unique").iterdir()}
    assert names == {"manifest.json", *(path.name for path in shards)}
    kept = {row: line for path in shards for row, line in numbered(path)}
    written = [line for path in sorted((tmp_path / "unique").glob("shard*")) for _, line in numbered(path)]
    assert written == [kept[row] for row in expected]  # the same bytes


def numbered(path: Path) -> list[tuple[int, bytes]]:
    return [(json.loads(line)["row"], line) for line in path.read_bytes().splitlines(keepends=True)]


def test_many_rows_in_few_digests_at_once() -> None:
    texts = [str(number * number % 1013) for number in range(5000)]
    passes = 0

    def read() -> list[str]:
        nonlocal passes
        passes += 1
        return texts

    unique = find_unique_rows(read, len(texts), "exact", max_digests=300)
    assert passes == 17
    assert [position for position in range(5000) if position in unique] == first_of(texts, str)
    assert unique.count() == len(set(texts))
    same = find_unique_rows(lambda: ["x"] * 1000, 1000, "exact", max_digests=1000)
    assert same.count() == 1


def test_a_complete_folder_is_not_written_again(tmp_path, monkeypatch) -> None:
    shards, folder = shards_of(tmp_path, TEXTS), tmp_path / "unique"
    counts = write_unique_shards(shards, folder, "exact", "job")
    with monkeypatch.context() as patch:
        patch.setattr(shards_module, "write_bytes", None)
        assert write_unique_shards(shards, folder, "exact", "job") == counts
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / shards[1].name).unlink()
    assert write_unique_shards(shards, folder, "exact", "job") == counts
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_another_job_or_mode_takes_the_folder_over(tmp_path) -> None:
    folder = tmp_path / "unique"
    write_unique_shards(shards_of(tmp_path, TEXTS), folder, "exact", "job")
    few = shards_of(tmp_path / "few", ["z", "Z", "z"])
    assert write_unique_shards(few, folder, "exact", "another") == DedupCounts(3, 2)
    assert kept_rows(folder) == [0, 1]
    assert write_unique_shards(few, folder, "normalized", "another") == DedupCounts(3, 1)
    assert kept_rows(folder) == [0]


def test_an_interrupted_write_is_started_again(tmp_path, monkeypatch) -> None:
    shards, folder = shards_of(tmp_path, TEXTS), tmp_path / "unique"
    write_unique_shards(shards, tmp_path / "whole", "exact", "job")
    flush, count = atomic_file._flush, 0

    def fail(file: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            os.ftruncate(file.fileno(), 3)
            raise OSError("the disk is full")
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "_flush", fail)
        with pytest.raises(OSError, match="the disk is full"):
            write_unique_shards(shards, folder, "exact", "job")
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in shards[:2]]
    write_unique_shards(shards, folder, "exact", "job")
    contents = [
        {path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, tmp_path / "whole")
    ]
    assert contents[0] == contents[1]


def test_wrong_values_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="`dedup` must be one of exact, normalized, got 'fuzzy'"):
        write_unique_shards([], tmp_path, "fuzzy", "job")
    with pytest.raises(InputError, match="`rows` must be the number of texts, which are 2, got 3"):
        find_unique_rows(lambda: ["a", "b"], 3, "exact")
    (tmp_path / "shard-00000.jsonl").write_text('{"row": 0, "completions": []}\n')
    with pytest.raises(InputError, match="`completions` must have a text in each result"):
        write_unique_shards([tmp_path / "shard-00000.jsonl"], tmp_path / "unique", "exact", "job")
