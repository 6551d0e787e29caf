"""The benchmark of jobs on a tiny model: the same tokens on all sides, every row once, slopes of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import job_cost, job_rows
from bench.job_sides import SideResult, cost_job, engine_side, local_side, rows_of_words, write_rows
from bench.jobs import main
from descant.models.loading.tiny_llama import toy
from tests.support import json_tokenizer


@pytest.fixture(scope="module")
def loaded():
    tokenizer = json_tokenizer.tokenizer()
    return toy(vocab_size=len(tokenizer)), tokenizer


@pytest.fixture
def job(tmp_path):
    return cost_job("toy", write_rows(tmp_path, rows_of_words(20)), 5, 4)


def test_the_sides_generate_the_same_tokens(job, loaded):
    direct, as_job = engine_side(job, *loaded), local_side(job, *loaded)
    assert direct.tokens == as_job.tokens == 100
    assert 0 < direct.outside < direct.seconds
    assert 0 < as_job.outside < as_job.seconds
    assert direct.start == 0 < as_job.start
    lines = (Path(as_job.output) / "shard-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(20))


def test_sides_take_turns_and_other_tokens_are_refused(job, capsys):
    calls: list[str] = []

    def side(name: str, tokens: int):
        return lambda _: calls.append(name) or SideResult(2.0, 1.0, 0.5, tokens)

    found = job_cost.measure_sides(job, {"engine": side("engine", 3), "job": side("job", 3)}, 2)
    assert calls == ["engine", "job", "job", "engine"]
    found["job"] = [one._replace(seconds=2.2, outside=0.6) for one in found["job"]]
    job_cost.print_ratios(found, rows=10)
    output = capsys.readouterr().out
    assert "job / engine: 1.1000 (1.1000 to 1.1000), bar 1.03; start 1.0 s apart" in output
    assert "1.0500 (1.0500 to 1.0500), +10000 us a row" in output
    with pytest.raises(SystemExit, match="same tokens"):
        job_cost.measure_sides(job, {"engine": side("engine", 3), "job": side("job", 4)}, 1)


def test_many_rows_end_once_and_their_memory_is_printed(loaded, tmp_path, monkeypatch, capsys):
    model, tokenizer = loaded
    monkeypatch.setattr(job_rows, "load_tokenizer", lambda _: (tokenizer, None))
    monkeypatch.setattr(job_rows, "toy", lambda **_: model)
    monkeypatch.setattr(job_rows, "_CHECKED_SHARDS", 100)
    monkeypatch.setattr(job_rows, "_SINK_FILES", 10)
    options = ["--rows", "400", "--every", "100", "--shard-rows", "50", "--folder", str(tmp_path)]
    main(["rows", *options])
    output = capsys.readouterr().out
    for text in ("400 rows:", "MB for 100,000 rows", "a missing shard", "bytes a row", "1e+10 rows"):
        assert text in output
    lines = "".join(path.read_text() for path in (tmp_path / "sink").glob("shard*")).splitlines()
    found = [json.loads(line)["row"] for line in lines]
    assert sorted(found) == list(range(400))
