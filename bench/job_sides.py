"""The same rows through an engine directly and as a job: in this process, in a worker process, and on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from bench.process_time import ProcessWatch, process_seconds, thread_seconds
from descant.config.generation_config import GenerationConfig
from descant.engine.protocol import Finished
from descant.engine.request import Request
from descant.engine.serving.async_engine import AsyncEngine
from descant.jobs import Job
from descant.jobs.description import JobProgress, JobResult, RunProgress, open_source
from descant.jobs.job import JobRun
from descant.jobs.job_model import JobModel, RowRequests
from descant.jobs.shards import ShardFolder, ShardGroup
from descant.jobs.workers.job_worker import LocalWorker
from descant.jobs.workers.worker_pool import WorkerPool

__all__ = [
    "SideResult",
    "cost_job",
    "engine_side",
    "local_side",
    "process_side",
    "ray_side",
    "rows_of_words",
    "write_rows",
]

_WORDS = (
    *("river", "stone", "lamp", "garden", "window", "ship", "letter", "winter"),
    *("harbour", "music", "bread", "friend", "paper", "hill", "evening"),
)
_TEMPLATE = "Tell a story of {text}:"


class SideResult(NamedTuple):
    """CPU seconds of all processes of a side, and what it generated."""

    seconds: float  # without the start
    start: float  # imports, loading, and the digest of the model
    outside: float  # of `seconds`, those of other threads than the engine's
    tokens: int
    output: str = ""  # the folder of a job's shards


def rows_of_words(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of a few words each, the same for each seed."""
    rng = random.Random(seed)
    return [{"text": " ".join(rng.choices(_WORDS, k=rng.randint(3, 12)))} for _ in range(count)]


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The rows as a file of JSON lines."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def cost_job(model: str, source: Path, new_tokens: int, in_flight: int) -> Job:
    """A greedy job; each run of a side has a sink of its own."""
    return Job(
        model=model,
        source=str(source),
        sink=str(source.parent / "sink"),
        template=_TEMPLATE,
        generation_config=GenerationConfig(max_new_tokens=new_tokens),
        shard_rows=100,
        max_in_flight=in_flight,
        report=False,
    )


@dataclass(frozen=True)
class TimedModel(JobModel):
    """A model whose engines say at their end how long their thread has run."""

    engine_seconds: list[float] = dataclasses.field(default_factory=list)

    def start_engine(self, workers: int = 1) -> tuple[AsyncEngine, GenerationConfig]:
        """An engine of the job."""
        engine, config = super().start_engine(workers)
        [thread] = [one for one in threading.enumerate() if one.name == "descant-engine"]
        assert thread.ident is not None
        clock, close = time.pthread_getcpuclockid(thread.ident), engine.close

        def close_timed() -> None:
            self.engine_seconds.append(time.clock_gettime(clock))
            close()

        engine.close = close_timed  # type: ignore[method-assign]
        return engine, config


class StartTimer:
    """Workers of a job, and the CPU time until they can run rows.

    `pid` is the process whose descendants they are.
    """

    def __init__(self, workers: LocalWorker | WorkerPool, clock: Callable[[], float], pid: int) -> None:
        self.seconds = 0.0
        self._workers, self._clock, self._pid = workers, clock, pid
        self._threads: dict[str, float] = {}

    def digest(self) -> str:
        began = self._clock()
        digest = self._workers.digest()
        self._add(began)
        return digest

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, progress: RunProgress) -> None:
        self._workers.run(groups, folder, progress)

    def close(self) -> None:
        self._workers.close()

    def engine_seconds(self) -> float:
        """The CPU time of the thread that was the busiest since the start: an engine's."""
        now = thread_seconds(self._pid, descendants=True)
        return max(seconds - self._threads.get(name, 0.0) for name, seconds in now.items())

    def _add(self, began: float) -> None:
        self.seconds += self._clock() - began
        self._threads = thread_seconds(self._pid, descendants=True)


def engine_side(job: Job, model: Any, tokenizer: Any) -> SideResult:
    """The requests of the rows through an engine, the longest first as in a job.

    Prompts are tokenized in the measured time; the new tokens are not made text.
    """
    own = TimedModel(job, model, tokenizer)
    began = time.process_time()
    finished = asyncio.run(_run_requests(own))
    seconds = time.process_time() - began
    tokens = sum(len(one.tokens) for result in finished for one in result.hypotheses)
    return SideResult(seconds, 0.0, seconds - own.engine_seconds[0], tokens)


async def _run_requests(model: JobModel) -> list[Finished]:
    job = model.job
    engine, config = model.start_engine()
    places = asyncio.Semaphore(job.rows_in_flight)
    finished: list[Finished] = []

    async def run(request: Request) -> None:
        finished.append(await engine.generate(request))
        places.release()

    with engine:
        requests = RowRequests(job, model.tokenizer, config, engine.traits, model.device)
        built = [requests.build(row) for row in open_source(job)]
        async with asyncio.TaskGroup() as tasks:
            for request in sorted(built, key=lambda one: -len(one.prompt)):
                await places.acquire()
                tasks.create_task(run(request))
    return finished


def local_side(job: Job, model: Any, tokenizer: Any) -> SideResult:
    """`Job.run(model, tokenizer)`."""
    own = TimedModel(job, model, tokenizer)
    workers = StartTimer(LocalWorker(own), time.process_time, os.getpid())
    began = time.process_time()
    result = _run(job, workers)
    seconds = time.process_time() - began - workers.seconds
    return SideResult(seconds, workers.seconds, seconds - own.engine_seconds[0], result.tokens, job.sink)


def process_side(job: Job) -> SideResult:
    """`Job.run()` with one worker process."""
    pid = os.getpid()
    began = process_seconds(pid)
    pool = WorkerPool(job, uuid4().hex)
    workers = StartTimer(pool, lambda: process_seconds(pid), pid)
    with contextlib.closing(workers):
        result = _run(job, workers)
        seconds = process_seconds(pid) - began - workers.seconds
        outside = seconds - workers.engine_seconds()
    return SideResult(seconds, workers.seconds, outside, result.tokens, job.sink)


def ray_side(job: Job, address: str, node: int) -> SideResult:
    """`Job.run(ray=address)` on a cluster of one node, whose process is `node`."""
    from descant.jobs.workers.ray_workers import RayWorkers  # an extra

    def clock() -> float:
        return time.process_time() - watch.own_seconds() + watch.seconds()

    engine: list[float] = []

    def on_progress(progress: JobProgress) -> None:
        if progress.finished == progress.rows:  # the actor ends right after it
            engine.append(workers.engine_seconds())

    with ProcessWatch(node) as watch:
        began = clock()
        inner = RayWorkers(job, uuid4().hex, address)
        workers = StartTimer(inner, clock, node)
        workers.seconds = clock() - began
        with contextlib.closing(workers):
            result = _run(job, workers, on_progress)
            seconds = clock() - began - workers.seconds
    return SideResult(seconds, workers.seconds, seconds - engine[-1], result.tokens, job.sink)


def _run(
    job: Job, workers: StartTimer, on_progress: Callable[[JobProgress], None] | None = None
) -> JobResult:
    shutil.rmtree(job.sink, ignore_errors=True)
    return JobRun(job).run(lambda: workers, on_progress)
