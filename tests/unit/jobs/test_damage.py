"""Shards that were changed are named and computed again; a source that changes during a run ends it."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.json as pj
import pyarrow.parquet as pq
import pytest

from descant import GenerationConfig, InputError
from descant.jobs import Job, JobProgress
from descant.jobs.shards import JsonLinesShards, ParquetShards

ROWS, SHARD_ROWS = 40, 4
BAD_ROW = 10
CONFIG = GenerationConfig(do_sample=True, max_new_tokens=2)
Records = list[dict[str, Any]]


def seeded(count: int) -> list[Any]:
    """The seeds of a test, of which CI runs the first."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, count))]


# ------------------------------------------------------------------------ shards
def edit(rows: Records) -> Records:
    completion = {**rows[1]["completions"][0], "text": rows[1]["completions"][0]["text"] + "!"}
    return [rows[0], {**rows[1], "completions": [completion]}, *rows[2:]]


RECORDS: dict[str, Callable[[Records], Records]] = {  # files that are whole and have other rows
    "edited": edit,
    "renumbered": lambda rows: [{**rows[0], "row": rows[0]["row"] + 1}, *rows[1:]],
    "last row lost": lambda rows: rows[:-1],
    "reordered": lambda rows: rows[::-1],
    "repeated": lambda rows: [rows[0], rows[0], *rows[2:]],
    "one more": lambda rows: [*rows, rows[-1]],
}


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": flip,
    "truncated": lambda data, rng: data[: rng.randrange(1, len(data))],
    "emptied": lambda *_: b"",
    "a blank at its end": lambda data, _: data + b"\n",
}
FILES = ("copied", "swapped", "errors lost", "errors edited")


def damage(kind: str, folder: Path, rng: random.Random) -> set[str]:
    """Damage a folder of shards; returns the names of the results of damaged shards."""
    paths = sorted(path for path in folder.glob("shard-*") if "errors" not in path.name)
    one, other = rng.sample(paths, 2)
    if kind in RECORDS:
        shards = ParquetShards(["name"]) if one.suffix == ".parquet" else JsonLinesShards()
        one.write_bytes(shards.encode(RECORDS[kind](list(shards.read(str(one))))))
    elif kind in BYTES:
        one.write_bytes(BYTES[kind](one.read_bytes(), rng))
    elif kind == "copied":
        shutil.copy2(other, one)
    elif kind == "swapped":
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
        return {one.name, other.name}
    else:
        [errors] = folder.glob("*.errors.jsonl")
        if kind == "errors lost":
            errors.unlink()
        else:
            errors.write_text(errors.read_text().replace(f'"row": {BAD_ROW}', '"row": 11'))
        return {errors.name.replace(".errors.jsonl", one.suffix)}
    return {one.name}


@pytest.mark.parametrize("seed", seeded(3))
@pytest.mark.parametrize("sink_format", ["jsonl", "parquet"])
def test_a_damaged_shard_is_named_and_computed_again(
    make_job, loaded, contents, sink_format: str, seed: int
) -> None:
    rows: list[Any] = [{"text": f"ship {row}", "name": f"n{row}"} for row in range(ROWS)]
    rows[BAD_ROW] = "{torn"
    job = make_job(
        rows,
        shard_rows=SHARD_ROWS,
        sink_format=sink_format,
        keep_columns="name",
        generation_config=CONFIG,
        report=False,
    )
    job.run(*loaded)
    whole, rng = contents(job.sink), random.Random(seed)
    for kind in (*RECORDS, *BYTES, *FILES):
        names = damage(kind, Path(job.sink), rng)
        seen: list[JobProgress] = []
        result = job.run(*loaded, on_progress=seen.append)
        assert set(result.damaged_files) == set(seen[0].damaged_files) == names, kind
        assert result.computed_rows == SHARD_ROWS * len(names), kind
        assert contents(job.sink) == whole, kind


def test_damage_during_a_run_is_named_at_its_end(make_job, loaded, contents) -> None:
    job = make_job(shard_rows=2, window=1, max_in_flight=1, report=False)

    def edit_first(progress: JobProgress) -> None:
        if progress.finished == 11:
            damage("edited", Path(job.sink), random.Random(0))

    with pytest.raises(InputError, match=r"`sink` must not be changed by others.*shard-0000\d\.jsonl"):
        job.run(*loaded, on_progress=edit_first)
    whole = dataclasses.replace(job, sink=job.sink + "-whole")
    whole.run(*loaded)
    assert len(job.run(*loaded).damaged_files) == 1
    assert contents(job.sink) == contents(whole.sink)


def test_shards_without_their_digests_are_refused(make_job, loaded) -> None:
    job = make_job()
    job.run(*loaded)
    (Path(job.sink) / "manifest.shards").unlink()
    with pytest.raises(InputError, match=r"`sink` must have manifest\.shards beside its shards"):
        job.run(*loaded)


@pytest.mark.parametrize("name", ["shard-00003.jsonl", "shard-00007.errors.jsonl"])
def test_a_shard_after_the_last_one_is_refused(make_job, loaded, name: str) -> None:
    job = make_job()
    job.run(*loaded)
    shutil.copy(Path(job.sink) / "shard-00001.jsonl", Path(job.sink) / name)
    with pytest.raises(InputError, match=rf"`sink` must have no shards after the last one.*{name}"):
        job.run(*loaded)


def test_a_damaged_folder_of_unique_rows_is_written_again(make_job, loaded) -> None:
    job = make_job(dedup="exact")
    job.run(*loaded)
    path = Path(job.sink) / "unique" / "shard-00001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"row", b"raw"))
    job.run(*loaded)
    assert path.read_bytes() == whole


# ------------------------------------------------------------------------ sources
def rewrite(path: Path, data: bytes, **_: Any) -> None:
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def replace(path: Path, data: bytes, **_: Any) -> None:
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


def rewrite_with_times(path: Path, data: bytes, **_: Any) -> None:
    found = path.stat()
    rewrite(path, data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def edit_rows(data: bytes) -> bytes:
    return data.replace(b"ship", b"boat")


CHANGES: dict[str, Callable[[Path, bytes], None]] = {
    "rewritten in place": lambda path, data: rewrite(path, edit_rows(data)),
    "replaced": lambda path, data: replace(path, edit_rows(data)),
    "appended": lambda path, data: rewrite(path, data + data[-20:]),
    "truncated": lambda path, data: rewrite(path, data[: len(data) * 2 // 3]),
    "emptied": lambda path, _: rewrite(path, b""),
    "same size and times": lambda path, data: rewrite_with_times(path, edit_rows(data)),
    "one byte": lambda path, data: rewrite_with_times(path, data[:-30] + b" " + data[-29:]),
    "removed": lambda path, _: path.unlink(),
}


def source_of(folder: Path, ending: str) -> list[Path]:
    """Two files of rows, whose names are too long for the value of an error."""
    folder = folder / "a-folder-with-a-name-of-many-letters-that-an-error-would-cut"
    folder.mkdir()
    lines = [json.dumps({"text": f"ship {row}", "name": f"n{row}"}) for row in range(ROWS)]
    paths = [folder / f"{number}.{ending}" for number in (0, 1)]
    for path, some in zip(paths, (lines[:25], lines[25:]), strict=True):
        path.write_text("".join(line + "\n" for line in some))
        if ending == "parquet":
            pq.write_table(
                pj.read_json(path), path, row_group_size=5, compression="none", use_dictionary=False
            )
        elif ending == "csv":
            rows = map(json.loads, some)
            path.write_text("text,name\n" + "".join(f"{one['text']},{one['name']}\n" for one in rows))
    return paths


@pytest.mark.parametrize("seed", seeded(3))
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_source_that_changes_at_any_moment_ends_the_run(
    make_job, loaded, contents, tmp_path: Path, ending: str, seed: int
) -> None:
    paths, rng = source_of(tmp_path, ending), random.Random(f"{ending} {seed}")
    plain = make_job(
        source=[str(path) for path in paths],
        shard_rows=SHARD_ROWS,
        keep_columns="text",
        generation_config=CONFIG,
        window=3,
        max_in_flight=2,
        report=False,
    )
    plain.run(*loaded)
    whole = contents(plain.sink)
    for number, (kind, change) in enumerate(CHANGES.items()):
        moment, path = rng.randrange(ROWS), rng.choice(paths)
        kept, job = path.read_bytes(), dataclasses.replace(plain, sink=str(tmp_path / f"sink{number}"))

        def change_once(progress: JobProgress) -> None:
            if progress.finished == moment:  # noqa: B023 - it is called before the next one
                change(path, kept)  # noqa: B023

        with pytest.raises(InputError, match=r"`source` must (not change|be files)") as caught:
            job.run(*loaded, on_progress=change_once)
        assert str(path) in str(caught.value), (kind, moment)
        shards = {name: data for name, data in contents(job.sink).items() if name.startswith("shard-")}
        assert shards.items() <= whole.items(), (kind, moment)
        if path.exists() and path.read_bytes() != kept:
            with pytest.raises(InputError, match=r"`sink` must be new|`source` must (be|have)"):
                job.run(*loaded)
        path.write_bytes(kept)
        job.run(*loaded)
        assert contents(job.sink) == whole, (kind, moment)


def test_a_source_that_is_read_while_it_is_another_leaves_no_row_of_it(make_job, loaded, contents) -> None:
    job: Job = make_job(shard_rows=2, window=1, max_in_flight=1, report=False)
    path = Path(job.source_files[0])
    whole = dataclasses.replace(job, sink=job.sink + "-whole")
    whole.run(*loaded)
    kept = path.read_bytes()

    def change_and_restore(progress: JobProgress) -> None:
        if progress.finished == 6:
            rewrite_with_times(path, edit_rows(kept))
        elif progress.finished == 9:
            rewrite_with_times(path, kept)

    with pytest.raises(InputError, match="`source` must not change during a run"):
        job.run(*loaded, on_progress=change_and_restore)
    path.write_bytes(kept)
    shards = {name: data for name, data in contents(job.sink).items() if name.startswith("shard-")}
    assert shards.items() <= contents(whole.sink).items()
