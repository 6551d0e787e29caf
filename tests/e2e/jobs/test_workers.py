"""Workers in processes of their own: one that ends is replaced, and a row that ends them is found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descant import GenerationConfig, WorkerFailed
from descant.jobs import Job, JobProgress
from descant.jobs.workers.worker_pool import WorkerPool
from descant.models.loading.loading import load
from tools.battery.subject import model_folder

SCORER = """
import os, signal

def score(row, text):
    if row["text"] == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text)
"""


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """A job on some rows, with any field changed."""

    def make(texts: list[str], **changes: Any) -> Job:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        values: dict[str, Any] = {
            "model": str(model_folder()),
            "source": str(source),
            "sink": str(tmp_path / "sink"),
            "template": "Tell of {text}:",
            "generation_config": GenerationConfig(do_sample=True, max_new_tokens=6),
            "shard_rows": 5,
            "window": 5,
            "max_in_flight": 4,
            "report": False,
        }
        return Job(**{**values, **changes})

    return make


def shards(folder: str) -> dict[str, bytes]:
    """The files of a job, by name, without the note of the model's files."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".job.json"}


def command_of(process: str) -> str:
    """The command line of a process."""
    return Path(f"/proc/{process}/cmdline").read_text()


def children() -> list[int]:
    """The workers of this process; it has other children, such as the fork server of the tests."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread, or a child, that has ended meanwhile
            processes = (task / "children").read_text().split()
            found += [int(child) for child in processes if "worker_pool" in command_of(child)]
    return found


def test_any_number_of_workers_and_any_kill_give_the_same_bytes(make_job, tmp_path) -> None:
    job = make_job([f"ship {number}" for number in range(40)])
    dataclasses.replace(job, sink=str(tmp_path / "whole")).run(*load(job.model, job.dtype))
    killed: list[int] = []
    seen: list[JobProgress] = []

    def kill_once(progress: JobProgress) -> None:
        seen.append(progress)
        if not killed:
            killed.append(children()[0])
            os.kill(killed[0], signal.SIGKILL)

    result = dataclasses.replace(job, workers=2).run(on_progress=kill_once)
    assert killed
    assert (result.rows, result.failed) == (40, 0)
    assert shards(job.sink) == shards(str(tmp_path / "whole"))
    assert seen[-1].finished == 40
    assert not children()


def test_a_row_that_ends_its_worker_is_isolated(make_job, tmp_path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)
    texts = [f"ship {number}" for number in range(20)]
    texts[12] = "poison"
    config = GenerationConfig(do_sample=True, max_new_tokens=6, num_return_sequences=2)
    select = {"method": "best_of_n", "scorer": f"{scorer}:score"}
    job = make_job(texts, generation_config=config, select=select)
    result = job.run()
    assert (result.rows, result.failed) == (20, 1)
    [error] = (Path(job.sink) / "shard-00002.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["row"] == 12
    assert "ended its worker process in 2 tries alone" in json.loads(error)["error"]
    rows = [
        json.loads(line)["row"]
        for path in Path(job.sink).glob("shard-?????.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(rows) == [row for row in range(20) if row != 12]


def test_an_error_of_a_worker_is_raised_by_the_run(make_job) -> None:
    with pytest.raises(WorkerFailed, match="no-such-model"):
        make_job(["a"], model="no-such-model").run()
    assert not children()


def test_workers_that_never_start_end_the_run(make_job, monkeypatch) -> None:
    start = subprocess.Popen

    def fail(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(WorkerFailed, match="by signal 9 before it had loaded its model"):
        make_job(["a"]).run()


def test_a_worker_ends_with_the_process_that_started_it(make_job) -> None:
    pool = WorkerPool(make_job(["a"]), "run")
    pool.digest()
    worker: Any = pool._workers[0]
    assert worker.process.stdin is not None
    worker.process.stdin.close()  # as the end of this process does
    began = time.monotonic()
    assert worker.process.wait(20) == 0
    assert time.monotonic() - began < 20
    pool.close()
