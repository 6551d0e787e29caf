"""`descant run`: a job of a file, options that override it, a dry run, a resume, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from descant.cli.application import build_app
from descant.cli.run import JobProgressDisplay, format_seconds
from descant.jobs import JobProgress
from descant.jobs.job_model import JobModel
from descant.jobs.workers.job_worker import LocalWorker
from tools.battery.subject import model_folder

NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from descant.cli.application import build_app
build_app()(["run", sys.argv[1]])
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job of five rows in shards of two."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"ship {n}"}) + "\n" for n in range(5)))
    lines = {
        "model": str(model_folder()),
        "source": str(tmp_path / "rows.jsonl"),
        "sink": str(tmp_path / "sink"),
        "template": "A {text}",
        "shard_rows": 2,
        "generation_config.max_new_tokens": 4,
    }
    path = tmp_path / "job.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a worker process, which takes seconds to start."""
    monkeypatch.setattr("descant.jobs.job.WorkerPool", lambda job, _: LocalWorker(JobModel.load(job)))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The result of `descant run`."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(build_app(), ["run", *map(str, arguments)])


def results(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("shard-?????.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_dry_run_writes_nothing_and_a_run_resumes(run, job_file) -> None:
    dry = run(job_file, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert dry.stdout.startswith("rows    5, 5 to compute\nshards  3, 3 to compute\ntime    0:00:")
    assert not (job_file.parent / "sink").exists()
    first = run(job_file)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("rows: 5, failed: 0, shards: 3; computed now: 5 rows, ")
    (job_file.parent / "sink" / "shard-00001.jsonl").unlink()
    assert "computed now: 2 rows, " in run(job_file).stdout
    assert [line["row"] for line in results(job_file.parent / "sink")] == list(range(5))


@pytest.mark.usefixtures("in_process")
def test_options_override_the_file(run, job_file, tmp_path) -> None:
    sink = tmp_path / "other"
    options = ("--sink", sink, "--max-new-tokens", 2, "--do-sample", "--seed", 3, "--shard-rows", 5)
    assert run(job_file, *options).exit_code == 0
    assert {line["completions"][0]["tokens"] for line in results(sink)} <= {1, 2}
    assert len(list(sink.glob("shard*"))) == 1
    refused = run(job_file, *options[:-3], 4, *options[-2:])
    assert refused.exit_code == 2
    assert "same job (`job` differ" in refused.stderr


@pytest.mark.usefixtures("in_process")
def test_shards_in_parquet(run, job_file, tmp_path) -> None:
    sink = tmp_path / "tables"
    assert run(job_file).exit_code == 0
    assert run(job_file, "--sink", sink, "--sink-format", "parquet").exit_code == 0
    tables = [pq.read_table(path).to_pylist() for path in sorted(sink.glob("shard-?????.parquet"))]
    found = [(one["row"], one["completions"][0]["text"]) for table in tables for one in table]
    lines = results(tmp_path / "sink")
    assert found == [(line["row"], line["completions"][0]["text"]) for line in lines]
    assert len(tables) == 3
    assert run(job_file, "--sink-format", "text").exit_code == 2


@pytest.mark.usefixtures("in_process")
def test_failed_rows_give_exit_code_1_with_counts(run, job_file) -> None:
    with (job_file.parent / "rows.jsonl").open("a") as file:
        file.write("torn\n")
    done = run(job_file)
    assert (done.exit_code, done.stdout[:30]) == (1, "rows: 6, failed: 1, shards: 3;")
    assert run(job_file).exit_code == 1  # also where nothing is left to compute


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('tenplate = "x"', "`tenplate` is not a key of a job, got 'x': did you mean `template`?"),
        (
            "generation_config.seed = 3",
            "`seed` must be unset in the `generation_config` of a job, got 3: set the `seed` of the job",
        ),
        ("generation_config.num_beams = 0", "`num_beams` must be an int >= 1, got 0"),
        ("shard_rows = 0", "`shard_rows` must be an integer >= 1, got 0"),
        ('keep_columns = ["id"]', "got 'id': leave it out, and set id_column = \"id\""),
    ],
)
def test_a_wrong_description_is_a_usage_error_in_the_words_of_the_file(run, job_file, line, message) -> None:
    kept = job_file.read_text().replace("shard_rows = 2\n", "")
    job_file.write_text(f"{kept}{line}\n")
    done = run(job_file)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {job_file}: `")
    assert message in done.stderr


@pytest.mark.usefixtures("in_process")
def test_a_damaged_shard_is_named(run, job_file) -> None:
    assert run(job_file).exit_code == 0
    shard = job_file.parent / "sink" / "shard-00001.jsonl"
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b"3", b"4"))
    done = run(job_file)
    assert "warning: shards that were changed are computed again: shard-00001.jsonl" in done.stderr
    assert "computed now: 2 rows" in done.stdout
    assert shard.read_bytes() == whole


def test_a_finished_job_loads_no_model(run, job_file) -> None:
    first = run(job_file)
    assert first.exit_code == 0, first.output
    program = job_file.parent / "program.py"
    program.write_text(NO_TORCH)
    command = [sys.executable, str(program), str(job_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rows: 5, failed: 0, shards: 3; computed now: 0 rows")


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_run_says_what_is_saved(run, job_file, monkeypatch) -> None:
    update = JobProgressDisplay.update

    def interrupt(display: JobProgressDisplay, progress: JobProgress) -> None:
        update(display, progress)
        if progress.finished == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(JobProgressDisplay, "update", interrupt)
    done = run(job_file, "--max-in-flight", 1, "--window", 1)
    assert done.exit_code == 130
    assert "interrupted: 1 of 3 shards are in " in done.stderr
    assert "the same command computes the others" in done.stderr


@pytest.mark.usefixtures("in_process")
def test_half_precision_is_warned_about(run, job_file) -> None:
    done = run(job_file, "--dtype", "bfloat16")
    assert done.exit_code == 0
    assert "float32 has the same bytes in every run" in done.stderr


def test_progress_is_a_line_from_time_to_time_without_a_terminal(monkeypatch, capsys) -> None:
    clock = iter((0.0, 11.0, 11.0, 12.0))  # the first row starts it
    monkeypatch.setattr("descant.cli.run.time.monotonic", lambda: next(clock))
    with JobProgressDisplay() as display:
        for finished in (0, 1, 2, 3):
            display.update(JobProgress(10, finished, 1, finished, 40, 2.0))
    assert capsys.readouterr().err == "2 of 10 rows, 20 tokens a second, 1 failed, 0:00:08 left\n"
    assert format_seconds(3723.4) == "1:02:03"
