"""Runs of a job in one process each, which are killed at random moments or in the middle of a commit."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from descant.core import atomic_file
from descant.jobs import Job
from tools.job_battery import commit_fault
from tools.job_battery.rows import are_expected, files_of

__all__ = ["ForkedRuns"]

COMPLETE = (0, 1)  # exit codes of a run: none, or some rows failed
ABORTED = 3
COMMIT_SHARE = 1 / 3  # of the kills


@dataclasses.dataclass
class ForkedRuns:
    """A job, the files of its undisturbed run, and what was seen.

    Each process runs or resumes the job, with limits of its own. Every shard that it leaves must have the
    bytes of the undisturbed run. When a job is complete the next one begins, until there were enough kills.
    """

    job: Job
    loaded: tuple[Any, Any]
    rng: random.Random
    seconds: float = 0.0  # of the undisturbed run
    expected: dict[str, bytes] = dataclasses.field(default_factory=dict)
    kills: dict[str, int] = dataclasses.field(default_factory=lambda: {"process": 0, "commit": 0})
    completions: int = 0
    torn: int = 0  # folders with files that differ from the undisturbed run
    shards_at_kills: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """The kills of both kinds."""
        return sum(self.kills.values())

    def run(self, folder: Path, kills: int) -> None:
        """Run once undisturbed, then kill and resume."""
        whole = folder / "whole"
        began = time.monotonic()
        if _wait(self._start(whole)) not in COMPLETE:
            raise RuntimeError("the undisturbed run failed")
        self.seconds = time.monotonic() - began
        self.expected = files_of(whole)
        number = 0
        while self.num_kills < kills:
            sink = folder / f"sink{number}"
            while self.num_kills < kills and not self._run_killed(sink):
                pass
            if _wait(self._start(sink)) not in COMPLETE:
                raise RuntimeError("a resumed run failed")
            self.torn += files_of(sink) != self.expected
            self.completions += 1
            number += 1

    def _run_killed(self, sink: Path) -> bool:
        """Start or resume a job and kill it; returns whether it ended before."""
        token = sink.with_suffix(".fault")
        token.unlink(missing_ok=True)
        process = self._start(sink, token)
        delay = self.rng.uniform(0, self.seconds * 0.5)
        kind = "commit" if self.rng.random() < COMMIT_SHARE else "process"
        time.sleep(delay)
        if kind == "commit":
            commit_fault.arm(token, self.rng.choice(("before", "after")))
        else:
            os.kill(process, signal.SIGKILL)
        code = _wait(process)
        if code == ABORTED:
            raise RuntimeError("a resumed run failed")
        found = files_of(sink)
        self.torn += not are_expected(found, self.expected)
        if code in COMPLETE:
            return True
        self.kills[kind] += 1
        self.shards_at_kills.append(sum(name.endswith(".jsonl") and "errors" not in name for name in found))
        return False

    def _start(self, sink: Path, token: Path | None = None) -> int:
        """A process that runs the job in a folder; this one never uses the model, so that it may fork."""
        limits = {"window": self.rng.choice((1, 8, 64)), "max_in_flight": self.rng.choice((1, 5, 32))}
        if not self.expected:
            limits = {"window": 64, "max_in_flight": 32}
        process = os.fork()
        if process:
            return process
        code = ABORTED
        try:
            if token is not None:
                commit_fault.install(atomic_file, str(token))
            job = dataclasses.replace(self.job, sink=str(sink), **limits)
            code = 1 if job.run(*self.loaded).failed else 0
        finally:
            os._exit(code)


def _wait(process: int) -> int:
    """The exit code of a process; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
