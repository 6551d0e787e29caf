"""Runs of jobs that select, leave out equal texts, draft, and end with a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from descant import ConfigError, GenerationConfig, InputError
from descant.jobs import SelectionConfig
from descant.jobs.description import JobDescription, encode_job, job_values

SAMPLES = GenerationConfig(do_sample=True, max_new_tokens=6, num_return_sequences=4)


def results(folder: str) -> list[dict[str, Any]]:
    files = sorted(Path(folder).glob("shard-?????.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("select", "keys"),
    [
        ({"method": "best_of_n", "scorer": "mean_logprob"}, {"score"}),
        ({"method": "best_of_n", "scorer": "length"}, {"score"}),
        ({"method": "vote"}, {"score", "answer", "votes"}),
        ({"method": "mbr", "ngram": 1}, {"score"}),
    ],
    ids=["mean_logprob", "length", "vote", "mbr"],
)
def test_a_row_keeps_its_best_completion(make_job, loaded, tmp_path, select, keys) -> None:
    everything = make_job(generation_config=SAMPLES, sink=str(tmp_path / "all"))
    everything.run(*loaded)
    job = make_job(generation_config=SAMPLES, select=select, window=4, max_in_flight=3)
    job.run(*loaded)
    for row, (one, samples) in enumerate(zip(results(job.sink), results(everything.sink), strict=True)):
        [chosen] = one["completions"]
        assert set(chosen) == {"text", "tokens", "finish_reason", *keys}, row
        assert len(samples["completions"]) == 4
        assert chosen["text"] in [sample["text"] for sample in samples["completions"]]


def test_a_function_is_given_all_columns_and_its_errors_are_of_the_row(make_job, loaded, tmp_path) -> None:
    path = tmp_path / "scorer.py"
    path.write_text("def score(row, text):\n    return 1 / (row['rank'] - 2) * len(text)\n")
    rows = [{"text": "a", "rank": rank} for rank in range(4)]
    job = make_job(rows, generation_config=SAMPLES, select={"method": "best_of_n", "scorer": f"{path}:score"})
    assert job.run(*loaded).failed == 1
    [error] = (Path(job.sink) / "shard-00000.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["row"] == 2
    assert "`scorer` must not raise (ZeroDivisionError" in json.loads(error)["error"]


def test_a_selection_is_part_of_the_job(make_job, loaded) -> None:
    select = SelectionConfig(method="vote")
    job = make_job(generation_config=SAMPLES, select=select)
    job.run(*loaded)
    with pytest.raises(InputError, match="same job"):
        make_job(generation_config=SAMPLES).run(*loaded)
    assert make_job(generation_config=SAMPLES, select=select).run(*loaded).computed_rows == 0
    with pytest.raises(ConfigError, match="`num_return_sequences` must be at least 2 with `select`"):
        make_job(select=select)
    with pytest.raises(InputError, match="`select` must be a SelectionConfig"):
        make_job(select=3)
    assert JobDescription(**job_values(encode_job(job))).select == select


@pytest.mark.parametrize("sink_format", ["jsonl", "parquet"])
def test_rows_of_equal_text_are_left_out_of_a_folder(make_job, loaded, sink_format) -> None:
    greedy = GenerationConfig(max_new_tokens=4)
    rows = [{"text": text} for text in "abacab"]
    job = make_job(rows, generation_config=greedy, dedup="exact", shard_rows=2, sink_format=sink_format)
    result = job.run(*loaded)
    assert result.unique_rows is not None
    assert result.unique_rows <= 3
    shards = sorted(path.name for path in Path(job.sink).glob("shard-*"))
    assert sorted(path.name for path in (Path(job.sink) / "unique").glob("shard-*")) == shards
    again = make_job(
        rows, generation_config=greedy, dedup="normalized", shard_rows=2, sink_format=sink_format
    )
    assert (again.run(*loaded).unique_rows or 9) <= result.unique_rows
    if sink_format == "jsonl":
        assert results(str(Path(job.sink) / "unique"))[0]["row"] == 0


def test_a_report_has_the_drafts_of_the_run(make_job, loaded) -> None:
    config = GenerationConfig(max_new_tokens=12, prompt_lookup_num_tokens=3)
    job = make_job([{"text": "ab ab ab ab"}] * 5, generation_config=config)
    result = job.run(*loaded)
    assert sum(result.drafted) >= sum(result.accepted) > 0
    page = Path(job.sink, "report.html").read_text()
    assert "accepted" in page
    Path(job.sink, "report.html").unlink()
    assert job.run(*loaded).computed_rows == 0
    assert Path(job.sink, "report.html").exists()
    Path(job.sink, "report.html").write_text("old")
    job.run(*loaded)
    assert Path(job.sink, "report.html").read_text() == "old"  # nothing was computed


def test_a_job_may_leave_the_report_out(make_job, loaded) -> None:
    job = make_job(report=False)
    job.run(*loaded)
    assert not Path(job.sink, "report.html").exists()
