"""`python -m bench.jobs rows`: many tiny rows through a job whose engine answers at once.

What is left is the job itself: time and memory by the number of rows. The log of attempts is written as by
a worker process. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import dataclasses
import json
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.instant_engine import InstantEngine
from bench.peak import Peak, resident_bytes
from descant.config.generation_config import GenerationConfig
from descant.engine.planning.planner import as_model
from descant.engine.serving.async_engine import AsyncEngine
from descant.jobs import Job
from descant.jobs.job import JobRun
from descant.jobs.job_model import JobModel
from descant.jobs.shards import JobManifest, ShardFolder, group_shards
from descant.jobs.source import JobSource, RowPosition, RowPositions
from descant.jobs.workers.job_worker import LocalWorker
from descant.models.loading.loading import load_tokenizer
from descant.models.loading.tiny_llama import toy

__all__ = ["add_rows_options", "run_rows"]

_MEGABYTE = 2**20
_BAR = 1.0  # MB for 100,000 rows
_CHECKED_SHARDS = 200_000
_SINK_FILES = 10_000
_WRITES = 20


def add_rows_options(parser: argparse.ArgumentParser) -> None:
    """The options of `rows`."""
    parser.add_argument("--model", default="models/smollm2", help="whose tokenizer is used")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=100_000, help="rows between two looks at the memory")
    parser.add_argument("--shard-rows", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--report", action="store_true", help="also write the job's report")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    parser.add_argument("--folder", type=Path, help="of the source and the sink; by default a temporary one")


@dataclass(frozen=True)
class InstantModel(JobModel):
    """A model whose engine answers at once."""

    on_finished: Callable[[int], None] = dataclasses.field(default=lambda _: None)

    def start_engine(self, workers: int = 1) -> tuple[AsyncEngine, GenerationConfig]:  # noqa: ARG002
        """The engine."""
        engine = InstantEngine(as_model(self.model).traits, self.tokenizer.eos_token_id, self.on_finished)
        return AsyncEngine(engine), self.generation_config


@dataclass
class MemoryLog:
    """The resident memory by the number of rows that have ended."""

    every: int
    points: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.process_time)

    def note(self, rows: int) -> None:
        """Look at the memory whenever enough rows have ended."""
        if rows < self.every * (len(self.points) + 1):
            return
        self.points.append((rows, resident_bytes()))
        seconds = time.process_time() - self.began
        rate = 1e6 * seconds / rows
        memory = self.points[-1][1] / _MEGABYTE
        print(f"  {rows:10,} rows: {memory:8.1f} MB, {rate:6.1f} us of CPU time a row", flush=True)

    def slope(self) -> float | None:
        """MB for 100,000 rows, by the later half of the points; None: there are too few."""
        later = self.points[len(self.points) // 2 :]
        if len(later) < 2:
            return None
        rows, memory = zip(*later, strict=True)
        return 1e5 * statistics.linear_regression(rows, memory).slope / _MEGABYTE


def run_rows(args: argparse.Namespace) -> None:
    """Print time and memory of a job by its number of rows."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)[0]
    model = toy(vocab_size=len(tokenizer))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        job = _job(args, folder)
        _write_source(Path(job.source_files[0]), args.rows)
        shutil.rmtree(job.sink, ignore_errors=True)
        memory = MemoryLog(args.every)
        # It writes a log of attempts, as a worker in a process of its own.
        workers = LocalWorker(InstantModel(job, model, tokenizer, memory.note), run="bench")
        began, memory.began = time.monotonic(), time.process_time()
        with _profiled() if args.profile else contextlib.nullcontext():
            result = JobRun(job).run(lambda: workers)
        seconds, cpu = time.monotonic() - began, time.process_time() - memory.began
        if (result.rows, result.failed, result.computed_rows) != (args.rows, 0, args.rows):
            sys.exit(f"every row must have a result, got {result}")
        micros = 1e6 * cpu / args.rows
        rate = args.rows / seconds
        print(f"{args.rows:,} rows: {rate:,.0f} rows a second, {micros:.1f} us of CPU time a row")
        slope = memory.slope()
        if slope is not None:
            print(f"memory: {slope:+.3f} MB for 100,000 rows, bar {_BAR}")
        _print_resume(job, workers, args.rows)
        _print_larger(job, micros, _id_bytes(job.source_files[0], args.rows))


def _job(args: argparse.Namespace, folder: Path) -> Job:
    return Job(
        model=args.model,
        source=str(folder / "rows.jsonl"),
        sink=str(folder / "sink"),
        template="{text}:",
        generation_config=GenerationConfig(max_new_tokens=1),
        shard_rows=args.shard_rows,
        max_in_flight=args.in_flight,
        report=args.report,
    )


def _write_source(path: Path, rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            file.write(json.dumps({"text": f"row {row}", "key": f"k{row}"}) + "\n")


def _print_resume(job: Job, workers: LocalWorker, rows: int) -> None:
    """The time of a run that finds all shards."""
    began = time.process_time()
    if JobRun(job).run(lambda: workers).computed_rows:
        sys.exit("a run must find all shards that an earlier run has written")
    print(f"a run that finds everything there: {1e6 * (time.process_time() - began) / rows:.2f} us a row")


def _shard_bytes() -> float:
    """What a missing shard takes of the memory of the process that starts the job."""
    manifest = JobManifest("0", "", "", _CHECKED_SHARDS, 1)
    with tempfile.TemporaryDirectory() as empty, Peak() as peak:
        began = time.process_time()
        missing = ShardFolder(empty, manifest).check_shards().missing
        positions = RowPositions()
        for shard in missing:
            positions.append(RowPosition(0, shard))
        for _ in group_shards(missing, manifest, positions, 1, 1):
            pass
        micros = 1e6 * (time.process_time() - began) / _CHECKED_SHARDS
    size = (peak.bytes or 0) / _CHECKED_SHARDS
    print(f"a missing shard: {micros:.1f} us, and {size:.0f} bytes in the process that starts the job")
    return size


def _write_micros() -> float:
    """The time that each file in the sink adds to the writing of a shard."""
    times = []
    for files in (0, _SINK_FILES):
        with tempfile.TemporaryDirectory() as name:
            sink = ShardFolder(name, JobManifest("0", "", "", _WRITES, 1))
            for number in range(files):
                sink.results_file(_WRITES + number).touch()
            began = time.process_time()
            for shard in range(_WRITES):
                sink.write(shard, [{"row": shard}], [])
            times.append(1e6 * (time.process_time() - began) / _WRITES)
    print(f"a shard write: {times[0]:.0f} us, and beside {_SINK_FILES:,} files {times[1]:.0f} us")
    return max(0.0, times[1] - times[0]) / _SINK_FILES


def _id_bytes(path: str, rows: int) -> float:
    """The peak memory of a scan that compares ids, above that of one that does not, for each row."""
    sizes = []
    for id_column in (None, "key"):
        with Peak() as peak:
            began = time.process_time()
            JobSource([path], id_column).scan(1000)
            micros = 1e6 * (time.process_time() - began) / rows
        sizes.append((peak.bytes or 0) / rows)
    size = sizes[1] - sizes[0]
    print(f"a scan that compares ids: {micros:.2f} us a row, and {size:.1f} bytes a row more than without")
    return size


def _print_larger(job: Job, row_micros: float, id_bytes: float) -> None:
    """What follows for larger jobs of this kind, with one worker."""
    shard_bytes, write_micros = _shard_bytes(), _write_micros()
    print("by these figures, without the engine's time:")
    for rows, shard_rows in ((10**7, job.shard_rows), (10**10, job.shard_rows), (10**10, 100_000)):
        shards = -(-rows // shard_rows)
        hours = row_micros * rows / 3.6e9
        listing = write_micros * shards**2 / 2 / 3.6e9
        print(
            f"  {rows:.0e} rows in shards of {shard_rows:,}: {hours:,.1f} CPU hours for the rows, "
            f"{listing:,.1f} to list the folder at each write, {shards:,} files, "
            f"positions {8 * shards / _MEGABYTE:,.1f} MB, in all {shard_bytes * shards / _MEGABYTE:,.0f} MB "
            f"in the process that starts the job; ids {id_bytes * rows / 2**30:,.1f} GB"
        )


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    """`asyncio.to_thread` in this thread, which is the one that is profiled."""
    return function(*args)


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    """Print the functions that take the most time, those of the engine's thread left out."""
    profile, original = cProfile.Profile(), asyncio.to_thread
    asyncio.to_thread = _call
    try:
        with profile:
            yield
    finally:
        asyncio.to_thread = original
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
