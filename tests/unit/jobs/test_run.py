"""Runs of jobs in this process: the same bytes for any limits, resumes, refusals, and rows that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from descant import EngineClosed, GenerationConfig, InputError
from descant.engine.serving.async_engine import AsyncEngine
from descant.jobs import JobEstimate, JobProgress, JobResult
from descant.jobs.job import _missing_row
from descant.jobs.job_model import row_seed
from descant.jobs.shards import JobManifest


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def all_rows(folder: str) -> list[int]:
    files = sorted(Path(folder).glob("shard-?????.jsonl"))
    return [line["row"] for file in files for line in lines(file)]


def test_limits_do_not_change_a_byte(make_job, loaded, contents, tmp_path) -> None:
    folders = []
    for number, (window, limit) in enumerate([(1, 1), (7, 3), (100, 100)]):
        job = make_job(window=window, max_in_flight=limit, sink=str(tmp_path / f"sink{number}"))
        result = job.run(*loaded)
        assert dataclasses.replace(result, seconds=0.0, tokens=0) == JobResult(23, 0, 3, 23, 0, 0.0)
        assert result.tokens > 23
        folders.append(contents(job.sink))
    assert folders[0] == folders[1] == folders[2]
    names = ["manifest.json", "manifest.shards", "manifest.source"]
    assert sorted(folders[0]) == [*names, *(f"shard-0000{shard}.jsonl" for shard in range(3))]
    assert all_rows(job.sink) == list(range(23))


def test_shards_are_saved_while_later_rows_run(make_job, loaded) -> None:
    """Also where all rows fit into one window."""
    rows = [{"text": "a ship " * (number * 7 % 11 + 1)} for number in range(60)]
    config = GenerationConfig(max_new_tokens=4, min_new_tokens=4)
    job = make_job(rows, shard_rows=4, max_in_flight=8, generation_config=config)
    saved: dict[int, int] = {}

    def count(progress: JobProgress) -> None:
        saved[progress.finished] = len(list(Path(job.sink).glob("shard-*")))

    job.run(*loaded, on_progress=count)
    assert saved[0] == 0
    assert all(count >= (finished - 16) // 4 - 2 for finished, count in saved.items())


def test_other_seeds_give_other_samples(make_job, loaded, contents, tmp_path) -> None:
    first, second = (make_job(seed=seed, sink=str(tmp_path / f"sink{seed}")) for seed in (0, 1))
    first.run(*loaded)
    second.run(*loaded)
    assert contents(first.sink)["shard-00000.jsonl"] != contents(second.sink)["shard-00000.jsonl"]
    assert len({row_seed(seed, name) for seed in (0, 1) for name in (1, "1", 2, "a")}) == 8
    same = make_job([{"text": "same"}] * 10, sink=str(tmp_path / "same"))
    same.run(*loaded)
    texts = {line["completions"][0]["text"] for line in lines(Path(same.sink) / "shard-00000.jsonl")}
    assert len(texts) > 5


def test_a_row_has_the_same_result_at_another_place_with_its_id(make_job, loaded, tmp_path) -> None:
    rows = [{"text": f"row {number}", "key": f"k{number}"} for number in range(12)]
    found = []
    for name, some in (("a", rows), ("b", rows[::-1])):
        job = make_job(some, id_column="key", keep_columns=["text"], sink=str(tmp_path / name))
        job.run(*loaded)
        kept = [line for file in sorted(Path(job.sink).glob("shard*")) for line in lines(file)]
        assert [line["id"] for line in kept] == [row["key"] for row in some]
        found.append({line["id"]: (line["text"], line["completions"]) for line in kept})
    assert found[0] == found[1]


def test_a_resume_computes_only_what_is_missing(make_job, loaded, contents) -> None:
    job = make_job()
    job.run(*loaded)
    whole = contents(job.sink)
    (Path(job.sink) / "shard-00001.jsonl").unlink()
    seen: list[JobProgress] = []
    result = job.run(*loaded, on_progress=seen.append)
    assert (result.computed_rows, result.rows) == (10, 23)
    assert contents(job.sink) == whole
    assert [one.finished for one in seen] == list(range(13, 24))
    assert seen[-1].seconds_left == 0
    assert seen[-1].tokens_per_second > 0
    assert job.run(*loaded).computed_rows == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 5}, "`job`"),
        ({"template": "Of {text}:"}, "`job`"),
        ({"generation_config": GenerationConfig(do_sample=True, max_new_tokens=7)}, "`job`"),
        ({"keep_columns": "name"}, "`job`"),
        ({"shard_rows": 5}, "`shard_rows`"),
        ({"sink_format": "parquet"}, "`sink_format`"),
        ({"rows": [{"text": "other"}] * 23}, "`source`"),
    ],
)
def test_another_job_is_refused_and_changes_nothing(make_job, loaded, contents, changes, name) -> None:
    job = make_job()
    job.run(*loaded)
    whole = contents(job.sink)
    with pytest.raises(
        InputError, match=f"`sink` must be new, or hold shards of the same job .{name} differ"
    ):
        make_job(**changes).run(*loaded)
    with pytest.raises(InputError, match="same job"):
        make_job(**changes).estimate(*loaded)
    assert contents(job.sink) == whole


def test_folders_of_something_else_are_refused(make_job, loaded) -> None:
    job = make_job()
    folder = Path(job.sink)
    folder.mkdir()
    (folder / "shard-00000.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"must be new, or have a manifest\.json beside its shards"):
        job.run(*loaded)
    (folder / "manifest.json").write_text("[")
    with pytest.raises(InputError, match=r"must have a readable manifest\.json"):
        job.run(*loaded)


def test_a_folder_in_use_is_refused(make_job, loaded) -> None:
    job = make_job()
    refused: list[str] = []

    def start_another(_: JobProgress) -> None:
        if not refused:
            with pytest.raises(InputError) as caught:
                make_job().run(*loaded)
            refused.append(str(caught.value))

    job.run(*loaded, on_progress=start_another)
    assert refused[0].startswith("`sink` must not be in use by another run")


def test_bad_rows_are_named_and_the_others_go_on(make_job, loaded, contents, tmp_path) -> None:
    rows: list[Any] = [{"text": f"row {number}"} for number in range(12)]
    rows[1] = "{torn"
    rows[2] = {"other": 1}
    rows[3] = {"text": "x", "generation_config": {"top_kk": 3}}
    rows[4] = {"text": "x", "generation_config": {"temperature": -1.0}}
    rows[5] = {"text": "long " * 5000}
    rows[11] = {"text": "x", "generation_config": {"max_time": 1.0}}
    reasons = {
        1: "JSON object",
        2: "`text` must hold",
        3: "top_kk",
        4: "temperature",
        5: "positions",
        11: "max_time",
    }
    job = make_job(rows, max_in_flight=2)
    result = job.run(*loaded)
    assert (result.failed, result.rows) == (6, 12)
    assert all_rows(job.sink) == [0, 6, 7, 8, 9, 10]
    errors = [line for file in sorted(Path(job.sink).glob("*errors*")) for line in lines(file)]
    assert [line["row"] for line in errors] == list(reasons)
    assert all(reasons[line["row"]] in line["error"] for line in errors)
    whole = contents(job.sink)
    (Path(job.sink) / "shard-00000.jsonl").unlink()  # a kill between the errors and the results
    again = job.run(*loaded)
    assert (again.failed, again.computed_rows) == (6, 10)
    assert contents(job.sink) == whole
    assert job.run(*loaded).failed == 6


def test_stale_errors_of_a_killed_run_are_removed(make_job, loaded, contents) -> None:
    job = make_job()
    job.run(*loaded)
    whole = contents(job.sink)
    (Path(job.sink) / "shard-00002.jsonl").unlink()
    (Path(job.sink) / "shard-00002.errors.jsonl").write_text('{"row": 21, "error": "no memory"}\n')
    assert job.run(*loaded).failed == 0
    assert contents(job.sink) == whole


def test_a_row_that_fails_in_the_engine_is_a_bad_row(make_job, loaded, monkeypatch) -> None:
    generate = AsyncEngine.generate

    async def fail_some(engine: AsyncEngine, request: Any, trace: Any = None) -> Any:
        if len(request.prompt) > 40:
            raise InputError("prompt", "must be short", "long")
        return await generate(engine, request, trace)

    monkeypatch.setattr(AsyncEngine, "generate", fail_some)
    result = make_job().run(*loaded)
    assert 0 < result.failed < 23


def test_a_closed_engine_ends_the_run_and_blames_no_row(make_job, loaded, monkeypatch, contents) -> None:
    async def refuse(*_: Any) -> Any:
        raise EngineClosed

    job = make_job()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncEngine, "generate", refuse)
        with pytest.raises(EngineClosed):
            job.run(*loaded)
    assert sorted(contents(job.sink)) == ["manifest.json", "manifest.source"]
    assert job.run(*loaded).failed == 0


def test_a_torn_temporary_file_is_not_taken_for_a_shard(make_job, loaded, contents) -> None:
    job = make_job()
    job.run(*loaded)
    whole = contents(job.sink)
    (Path(job.sink) / "shard-00001.jsonl").unlink()
    torn = Path(job.sink) / f".shard-00001.jsonl.{'0' * 32}.descant-part"
    torn.write_bytes(whole["shard-00001.jsonl"][:40])
    assert job.run(*loaded).computed_rows == 10
    assert contents(job.sink) == whole  # the leftover is removed


def test_the_time_left_is_told_when_the_pace_is_known() -> None:
    def left(finished: int, computed: int) -> float | None:
        return JobProgress(300, finished, 0, computed, 9, seconds=50.0, in_flight=64).seconds_left

    assert [left(0, 0), left(1, 1), left(63, 63), left(64, 64)] == [None, None, None, 236 * 50 / 64]
    assert [left(201, 1), left(249, 49), left(250, 50)] == [None, None, 50]  # 200 rows are of earlier runs


def test_an_estimate_writes_nothing(make_job, loaded) -> None:
    job = make_job([*({"text": str(number)} for number in range(9)), "bad"], max_in_flight=5)
    estimate = job.estimate(*loaded)
    assert isinstance(estimate, JobEstimate)
    sizes = (estimate.rows, estimate.missing_rows, estimate.shards, estimate.missing_shards)
    assert sizes == (10, 10, 1, 1)
    assert (estimate.measured_rows, estimate.failed_rows) == (5, 0)
    assert estimate.seconds > 0
    assert estimate.tokens_per_second > 0
    assert not Path(job.sink).exists()
    job.run(*loaded)
    done = job.estimate(*loaded)
    assert (done.missing_rows, done.measured_rows, done.seconds) == (0, 0, 0.0)


def test_the_rows_of_an_estimate_are_numbered_among_the_missing_ones() -> None:
    manifest = JobManifest("0", "", "", 23, 10)
    for missing in ([0, 1, 2], [0, 2], [2], [1]):
        rows = [row for shard in missing for row in manifest.rows_of(shard)]
        assert [_missing_row(missing, manifest, number) for number in range(len(rows))] == rows


def test_an_empty_source_is_a_job_without_shards(make_job, loaded, contents) -> None:
    job = make_job([])
    assert (job.run(*loaded).shards, job.estimate(*loaded).rows) == (0, 0)
    assert sorted(contents(job.sink)) == ["manifest.json", "manifest.source"]


def test_it_runs_where_an_event_loop_is_running(make_job, loaded) -> None:
    async def call() -> JobResult:
        return make_job().run(*loaded)  # type: ignore[no-any-return]

    assert asyncio.run(call()).computed_rows == 23

    async def fail() -> None:
        make_job(seed=3).run(*loaded)

    with pytest.raises(InputError, match="same job"):
        asyncio.run(fail())


def test_a_model_without_its_tokenizer_is_refused(make_job, loaded) -> None:
    with pytest.raises(InputError, match="`tokenizer` must be given together"):
        make_job().run(loaded[0])


HOSTILE = [
    {"self": 1},
    {"": 1},
    {"seed": 2**70},
    {"seed": "x"},
    {"top_k": 10**30},
    {"temperature": float("nan")},
    {"max_new_tokens": 10**12},
    {"num_beams": 10**6, "do_sample": False},
    {"bad_words_ids": [[10**30]]},
    {"stop_strings": ["\ud800"]},
    {"stop_regex": "("},
    {"grammar": {"regex": "("}},
    {"eos_token_id": -5},
    {"generation_kwargs": {"input_ids": 3}},
    {"constraints": 3},
    {"cache_implementation": "none such"},
    {"guidance_scale": 2.0, "negative_prompt_ids": "x"},
]


def test_hostile_parameters_fail_their_row_alone(make_job, loaded) -> None:
    rows = [{"text": "b", "generation_config": config} for config in HOSTILE]
    job = make_job([{"text": "a"}, *rows, {"text": "c"}])
    assert job.run(*loaded).failed == len(HOSTILE)
    assert all_rows(job.sink) == [0, len(HOSTILE) + 1]
