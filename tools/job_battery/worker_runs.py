"""Runs of a job with workers, any process of which is killed: the driver, a worker, or one in a commit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from descant.jobs import Job
from descant.jobs.description import encode_job
from tools.job_battery import commit_fault
from tools.job_battery.ray_environment import ray_environment
from tools.job_battery.rows import are_expected, files_of

__all__ = ["KINDS", "WorkerRuns"]

KINDS = ("driver", "worker", "commit")
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import json, sys
from descant.jobs import Job
from descant.jobs.description import job_values
Job(**job_values(json.loads(sys.argv[1]))).run(ray=sys.argv[2] or None)
"""


@dataclasses.dataclass
class WorkerRuns:
    """A job that is run in processes or on a Ray cluster, and what was seen."""

    job: Job
    expected: dict[str, bytes]
    rng: random.Random
    token: Path  # of commit faults
    ray: str = ""  # the address of a cluster; empty: processes of this machine
    max_pause: float = 20.0  # seconds between kills
    kills: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    completions: int = 0
    torn: int = 0

    @property
    def num_kills(self) -> int:
        """The kills of all kinds."""
        return sum(self.kills.values())

    def run(self, folder: Path, kills: int) -> None:
        """Kill processes of a job until there were enough; each job runs to its end."""
        while self.num_kills < kills:
            sink = folder / f"job{self.completions}"
            while not self._run_once(sink, kills):
                self._compare(sink)
            self.torn += files_of(sink) != self.expected
            self.completions += 1

    def _run_once(self, sink: Path, kills: int) -> bool:
        """Run or resume a job beside kills; returns whether it is complete."""
        self.token.unlink(missing_ok=True)
        driver = self._start(sink)
        try:
            while self.num_kills < kills:
                try:
                    driver.wait(self.rng.uniform(0.0, self.max_pause))
                    break
                except subprocess.TimeoutExpired:
                    pass
                kind = self.rng.choice(KINDS)
                if kind == "driver":
                    driver.kill()
                    self.kills[kind] += 1
                elif kind == "worker":
                    self.kills[kind] += self._kill_worker(driver)
                else:
                    commit_fault.arm(self.token, self.rng.choice(("before", "after")))
                    self.kills[kind] += _wait_until_gone(self.token, driver)
            code = driver.wait()
        finally:
            driver.kill()
            driver.wait()
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a run failed with exit code {code}")
        return code == 0

    def _compare(self, sink: Path) -> None:
        self.torn += not are_expected(files_of(sink), self.expected)

    def environment(self) -> dict[str, str]:
        """The variables of processes that take part in commit faults."""
        paths = [str(commit_fault.SITE), str(_ROOT / "src"), str(_ROOT)]
        return {"PYTHONPATH": os.pathsep.join(paths), commit_fault.VARIABLE: str(self.token)}

    def _start(self, sink: Path) -> subprocess.Popen[bytes]:
        job = dataclasses.replace(
            self.job, sink=str(sink), window=self.rng.choice((10, 64)), max_in_flight=16
        )
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(encode_job(job)), self.ray],
            env=ray_environment(self.environment()),
            stdout=subprocess.DEVNULL,
        )

    def _kill_worker(self, driver: subprocess.Popen[bytes]) -> bool:
        workers = _ray_workers() if self.ray else _children(driver.pid)
        if not workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(workers), signal.SIGKILL)
            return True
        return False


def _wait_until_gone(token: Path, driver: subprocess.Popen[bytes]) -> bool:
    """Whether a commit took the fault before the run ended."""
    while token.exists():
        if driver.poll() is not None:
            return not token.exists()
        time.sleep(0.05)
    return True


def _children(pid: int) -> Sequence[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _ray_workers() -> Sequence[int]:
    """The actors of jobs on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::") and b"JobActor" in path.read_bytes():
                found.append(int(path.parent.name))
    return found
