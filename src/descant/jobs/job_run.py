"""One run of a job on one machine: rows into requests of an engine, their results into shards."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import descant
from descant.api.completion_record import completion_text
from descant.api.run_digest import run_settings
from descant.config.generation_config import GenerationConfig
from descant.engine.async_engine import AsyncEngine
from descant.engine.events import Finished
from descant.engine.planner import as_model
from descant.engine.request import Request
from descant.engine.scheduler_sizing import sized_scheduler
from descant.errors import DescantError, EngineClosed, EngineFull, InputError, RankError
from descant.jobs.description import JobDescription
from descant.jobs.results import JobEstimate, JobProgress, JobResult
from descant.jobs.row_requests import RowRequests, source_columns
from descant.jobs.shard_folder import JobManifest, ShardFolder
from descant.jobs.source import JobSource, SourceRow
from descant.kv_cache.prefix_cache import PrefixCache

__all__ = ["JobRun"]

Result = TypeVar("Result")
_MEASURED_ROWS: Final = 16
_NOT_OF_A_ROW: Final = (EngineClosed, EngineFull, RankError)  # end the run: the row itself may be good


class RowTask(NamedTuple):
    """A row and its request, or why it has none."""

    row: SourceRow
    request: Request | None
    error: DescantError | None = None


class RowOutcome(NamedTuple):
    """A row's record of output, whether it is an error, and its number of tokens."""

    row: int
    record: dict[str, Any]
    is_error: bool
    tokens: int


@dataclass
class _Counts:
    """What a run has done."""

    finished: int
    failed: int
    began: float
    computed: int = 0
    tokens: int = 0


@dataclass
class _Shards:
    """The outcomes of shards that are not complete yet."""

    folder: ShardFolder
    outcomes: dict[int, dict[int, RowOutcome]] = field(default_factory=dict)

    def add(self, outcome: RowOutcome) -> int | None:
        """Keep an outcome; returns the shard that it completes."""
        shard = outcome.row // self.folder.manifest.shard_rows
        found = self.outcomes.setdefault(shard, {})
        found[outcome.row] = outcome
        return shard if len(found) == len(self.folder.manifest.rows_of(shard)) else None

    def write(self, shard: int) -> None:
        """Write a complete shard, its rows in order."""
        outcomes = [one for _, one in sorted(self.outcomes.pop(shard).items())]
        results = [one.record for one in outcomes if not one.is_error]
        self.folder.write(shard, results, [one.record for one in outcomes if one.is_error])


class JobRun:
    """Runs a job on a loaded model."""

    def __init__(
        self,
        job: JobDescription,
        model: Any,
        tokenizer: Any,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> None:
        self.job, self.model, self.tokenizer = job, model, tokenizer
        self._on_progress = on_progress
        self._source = JobSource(job.source_files, job.id_column, source_columns(job))
        summary = self._source.scan(job.shard_rows)
        manifest = JobManifest(
            descant.__version__,
            self._digest(),
            summary.digest,
            summary.rows,
            job.shard_rows,
            job.sink_format,
        )
        ids = () if job.id_column is None else ("id",)
        self._folder = ShardFolder(job.sink, manifest, (*ids, *job.keep_columns))

    def run(self) -> JobResult:
        """Compute the shards that are missing."""
        began = time.monotonic()
        with self._folder.open():
            missing, failed = self._folder.check_shards()
            rows = self._folder.manifest.rows
            num_missing = sum(len(self._folder.manifest.rows_of(shard)) for shard in missing)
            counts = _Counts(rows - num_missing, failed, began)
            if missing:
                _run_async(self._run_shards(set(missing), counts))
            if self._folder.missing():
                raise InputError("source", "must not change during a run", "fewer rows than before")
        seconds = time.monotonic() - began
        return JobResult(
            rows, counts.failed, self._folder.manifest.shards, counts.computed, counts.tokens, seconds
        )

    def estimate(self) -> JobEstimate:
        """The size of the job and the time of its missing rows, by some that are computed and not kept."""
        manifest = self._folder.manifest
        self._folder.check()
        missing = self._folder.missing()
        num_missing = sum(len(manifest.rows_of(shard)) for shard in missing)
        count = min(num_missing, _MEASURED_ROWS, self.job.max_in_flight)
        # Spread over the missing rows: a source may be sorted by length.
        rows = list(itertools.chain.from_iterable(manifest.rows_of(shard) for shard in missing))
        chosen = {rows[number * num_missing // count] for number in range(count)}
        seconds, tokens, failed = _run_async(self._measure(chosen)) if chosen else (0.0, 0, 0)
        return JobEstimate(
            rows=manifest.rows,
            missing_rows=num_missing,
            shards=manifest.shards,
            missing_shards=len(missing),
            measured_rows=count,
            failed_rows=failed,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            seconds=seconds * num_missing / count if count else 0.0,
        )

    # -------------------------------------------------------------------- rows
    async def _run_shards(self, missing: set[int], counts: _Counts) -> None:
        """Run all rows of the missing shards."""
        places = asyncio.Semaphore(self.job.max_in_flight)
        shards = _Shards(self._folder)
        size = self._folder.manifest.shard_rows
        with self._start_engine() as engine:
            requests = self._row_requests(engine)
            rows = (row for row in self._source if row.index // size in missing)

            async def run_row(task: RowTask) -> None:
                try:
                    outcome = await self._run_row(engine, task)
                finally:
                    places.release()
                self._count(counts, outcome)
                complete = shards.add(outcome)
                if complete is not None:  # beside the other rows: flushing to a disk takes long
                    await asyncio.to_thread(shards.write, complete)

            async with asyncio.TaskGroup() as group:
                while window := await asyncio.to_thread(self._next_window, rows, requests):
                    for task in window:
                        await places.acquire()
                        group.create_task(run_row(task))

    def _next_window(self, rows: Iterator[SourceRow], requests: RowRequests) -> list[RowTask]:
        """The next rows with their requests, the longest first: rows of similar length run together."""
        tasks = [_make_task(requests, row) for row in itertools.islice(rows, self.job.window)]
        return sorted(tasks, key=lambda task: -len(task.request.prompt) if task.request is not None else 0)

    async def _run_row(self, engine: AsyncEngine, task: RowTask) -> RowOutcome:
        """The outcome of a row."""
        if task.request is None:
            assert task.error is not None
            return self._error(task.row, task.error)
        try:
            finished = await engine.generate(task.request)
        except _NOT_OF_A_ROW:
            raise
        except DescantError as error:
            return self._error(task.row, error)
        return self._result(task.row, task.request, finished)

    def _result(self, row: SourceRow, request: Request, finished: Finished) -> RowOutcome:
        # Without scores, whose last digits depend on the rows beside it.
        completions = [
            {
                "text": completion_text(self.tokenizer, request, one.tokens.tolist()),
                "tokens": len(one.tokens),
                "finish_reason": one.reason,
            }
            for one in finished.hypotheses
        ]
        kept = {name: row.data[name] for name in self.job.keep_columns if name in row.data}
        record = {**self._names(row), **kept, "completions": completions}
        return RowOutcome(row.index, record, False, sum(len(one.tokens) for one in finished.hypotheses))

    def _error(self, row: SourceRow, error: DescantError) -> RowOutcome:
        return RowOutcome(row.index, {**self._names(row), "error": str(error)}, True, 0)

    def _names(self, row: SourceRow) -> dict[str, Any]:
        """How a line of output names its row."""
        return {"row": row.index} if self.job.id_column is None else {"row": row.index, "id": row.id}

    def _count(self, counts: _Counts, outcome: RowOutcome) -> None:
        counts.finished += 1
        counts.computed += 1
        counts.failed += outcome.is_error
        counts.tokens += outcome.tokens
        if self._on_progress is not None:
            self._on_progress(
                JobProgress(
                    rows=self._folder.manifest.rows,
                    finished=counts.finished,
                    failed=counts.failed,
                    computed=counts.computed,
                    tokens=counts.tokens,
                    seconds=time.monotonic() - counts.began,
                )
            )

    async def _measure(self, chosen: set[int]) -> tuple[float, int, int]:
        """The seconds, tokens and failures of some rows, run together."""
        with self._start_engine() as engine:
            requests = self._row_requests(engine)
            rows = [row for row in self._source if row.index in chosen]
            began = time.monotonic()
            tasks = [_make_task(requests, row) for row in rows]
            outcomes = await asyncio.gather(*(self._run_row(engine, task) for task in tasks))
            seconds = time.monotonic() - began
        return seconds, sum(one.tokens for one in outcomes), sum(one.is_error for one in outcomes)

    # -------------------------------------------------------------------- parts
    def _start_engine(self) -> AsyncEngine:
        scheduler, budget = sized_scheduler(self.model)
        return AsyncEngine(
            self.model, scheduler=scheduler, prefix_cache=PrefixCache(max_bytes=budget or 2**30)
        )

    def _row_requests(self, engine: AsyncEngine) -> RowRequests:
        config = GenerationConfig.from_transformers(self.model.generation_config)
        return RowRequests(self.job, self.tokenizer, config, engine.traits, as_model(self.model).device)

    def _digest(self) -> str:
        """The digest of everything that decides the results, without what only changes the speed."""
        job = self.job
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()
        settings = run_settings(
            self.model,
            self.tokenizer,
            vocabulary=hashlib.blake2b(vocabulary, digest_size=16).hexdigest(),
            dtype=str(self.model.dtype),
            device=as_model(self.model).device.type,
            config=job.generation_config,
            prompt=json.dumps([job.template, job.chat]),
            columns=json.dumps([job.override_columns, job.id_column, job.keep_columns]),
            seed=job.seed,
        )
        return hashlib.blake2b(settings, digest_size=16, person=b"descant job").hexdigest()


def _make_task(requests: RowRequests, row: SourceRow) -> RowTask:
    try:
        return RowTask(row, requests.build(row))
    except DescantError as error:
        return RowTask(row, None, error)


def _run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unwrapped(work)
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(_unwrapped(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="descant-job")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _unwrapped(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine; of errors in several tasks the first is raised."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
