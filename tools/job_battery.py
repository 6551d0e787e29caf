"""Kill a job again and again, and compare its shards with those of a run that nobody disturbed.

    python -m tools.job_battery --kills 100 --rows 2000

Each process runs or resumes the job, with limits of its own, and gets SIGKILL at a random moment. Every shard
that it leaves must have the bytes of the undisturbed run. When a job is complete, the next one begins, until
there were enough kills; the last one runs to its end. The exit code is 1 if any byte differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from descant import GenerationConfig
from descant.jobs import Job
from descant.models.loading import load
from tools.battery.subject import model_folder

__all__ = ["JobBattery", "main"]

SHARD_ROWS = 10
BAD_EVERY = 17  # rows that cannot be parsed
COMPLETE = (0, 1)  # exit codes of a run: none, or some rows failed
ABORTED = 3


@dataclasses.dataclass
class JobBattery:
    """A job, the files of its undisturbed run, and what was seen."""

    job: Job
    loaded: tuple[Any, Any]
    rng: random.Random
    seconds: float = 0.0  # of the undisturbed run
    expected: dict[str, bytes] = dataclasses.field(default_factory=dict)
    kills: int = 0
    completions: int = 0
    torn: int = 0  # files that differ from the undisturbed run
    shards_at_kills: list[int] = dataclasses.field(default_factory=list)

    def run(self, folder: Path, kills: int) -> None:
        """Run once undisturbed, then kill and resume."""
        whole = folder / "whole"
        began = time.monotonic()
        if self._wait(self._start(whole)) not in COMPLETE:
            raise RuntimeError("the undisturbed run failed")
        self.seconds = time.monotonic() - began
        self.expected = files_of(whole)
        number = 0
        while self.kills < kills:
            sink = folder / f"sink{number}"
            while self.kills < kills and not self._run_killed(sink):
                pass
            if self._wait(self._start(sink)) not in COMPLETE:
                raise RuntimeError("a resumed run failed")
            self.torn += files_of(sink) != self.expected
            self.completions += 1
            number += 1

    def _run_killed(self, sink: Path) -> bool:
        """Start or resume a job and kill it at a random moment; returns whether it ended before."""
        process = self._start(sink)
        time.sleep(self.rng.uniform(0, self.seconds * 0.5))
        os.kill(process, signal.SIGKILL)
        code = self._wait(process)
        if code == ABORTED:
            raise RuntimeError("a resumed run failed")
        found = {name: data for name, data in files_of(sink).items() if not name.startswith(".")}
        self.torn += any(self.expected.get(name) != data for name, data in found.items())
        if code in COMPLETE:
            return True
        self.kills += 1
        self.shards_at_kills.append(sum(name.endswith(".jsonl") and "errors" not in name for name in found))
        return False

    def _start(self, sink: Path) -> int:
        """A process that runs the job in a folder; this one never uses the model, so that it may fork."""
        limits = {"window": self.rng.choice((1, 8, 64)), "max_in_flight": self.rng.choice((1, 5, 32))}
        if not self.expected:
            limits = {"window": 64, "max_in_flight": 32}
        process = os.fork()
        if process:
            return process
        code = ABORTED
        try:
            job = dataclasses.replace(self.job, sink=str(sink), **limits)
            code = 1 if job.run(*self.loaded).failed else 0
        finally:
            os._exit(code)

    def _wait(self, process: int) -> int:
        """The exit code of a process; negative: the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def write_rows(path: Path, rows: int) -> None:
    """A source whose prompts have different lengths, with some rows that cannot be parsed."""
    lines = [
        "{torn"
        if row % BAD_EVERY == BAD_EVERY - 1
        else json.dumps({"text": "a ship " * (row * 7 % 11 + 1), "temperature": 0.5 + row % 3})
        for row in range(rows)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def main() -> int:
    """Run the battery of the command line and print one line of figures."""
    parser = argparse.ArgumentParser("python -m tools.job_battery")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="job-battery-") as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows)
        job = Job(
            model=str(model_folder()),
            source=str(folder / "rows.jsonl"),
            sink=str(folder / "sink"),
            template="Tell of {text}:",
            generation_config=GenerationConfig(do_sample=True, max_new_tokens=12),
            override_columns="temperature",
            shard_rows=SHARD_ROWS,
        )
        battery = JobBattery(job, load(job.model, job.dtype), random.Random(options.seed))
        battery.run(folder, options.kills)
    figures = {
        "rows": options.rows,
        "kills": battery.kills,
        "completions": battery.completions,
        "torn": battery.torn,
        "rows_once": rows_once(battery.expected, options.rows),
        "shards_at_kills": [min(battery.shards_at_kills), max(battery.shards_at_kills)],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures), flush=True)
    return 1 if battery.torn or not figures["rows_once"] else 0


def rows_once(files: dict[str, bytes], rows: int) -> bool:
    """Whether each row is in the results or in the errors, and in one of them once."""
    found = [
        json.loads(line)["row"]
        for name, data in files.items()
        if ".jsonl" in name
        for line in data.splitlines()
    ]
    return sorted(found) == list(range(rows))


if __name__ == "__main__":
    sys.exit(main())
