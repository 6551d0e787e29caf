"""A worker of a job: rows of a group of shards through one engine, their results into the shards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from descant.api.completion_record import completion_text
from descant.engine.async_engine import AsyncEngine
from descant.engine.events import Finished
from descant.engine.request import Request
from descant.errors import DescantError, EngineClosed, EngineFull, RankError
from descant.jobs.attempt_log import MAX_TRIES, AttemptLog
from descant.jobs.description import JobDescription
from descant.jobs.job_files import open_source
from descant.jobs.job_model import JobModel
from descant.jobs.row_requests import RowRequests
from descant.jobs.selection import CompletionSelector
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import GroupReport, ShardGroup, add_counts
from descant.jobs.source import JobSource, SourceRow

__all__ = ["JobWorker", "RowOutcome"]

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
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


OnRow = Callable[[ShardGroup, RowOutcome], None]


@dataclass
class _GroupOutcomes:
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


class JobWorker:
    """Runs groups of shards on an engine; use it in a `with` block, in one event loop.

    `run_group` may be called for `GROUPS_AT_ONCE` groups at once: their rows share the places of the engine.
    A row that was running when an earlier worker ended runs alone, and fails if it ends its worker again.
    """

    def __init__(self, model: JobModel, run: str | None = None, workers: int = 1, name: str = "") -> None:
        self.job: JobDescription = model.job
        self.name = name
        self._model, self._run, self._workers = model, run, workers
        self._source: JobSource | None = None
        self._places = asyncio.Semaphore(self.job.rows_in_flight)
        self._starting = asyncio.Lock()  # one group at a time starts rows
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        engine, config = self._model.start_engine(self._workers)
        self._engine: AsyncEngine = self._stack.enter_context(engine)
        self._requests = RowRequests(
            self.job, self._model.tokenizer, config, engine.traits, self._model.device
        )
        select = self.job.select
        self._selector = None if select is None else CompletionSelector(select)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    async def run_group(
        self, group: ShardGroup, folder: ShardFolder, on_row: OnRow | None = None
    ) -> GroupReport:
        """Compute what is missing of a group of shards."""
        if self._source is None:
            self._source = open_source(self.job, folder.read_source())
        # Others are of a worker that ended before it could report.
        missing, failed, _ = folder.check_shards(group.shards)
        rows = sum(len(folder.manifest.rows_of(shard)) for shard in set(group.shards) - set(missing))
        report = GroupReport(group.first, rows, failed, worker=self.name)
        if not missing:
            return report
        log = AttemptLog(folder.path, group.first, self._run)
        run = _GroupRun(self, group, folder, log, on_row)
        run.report = report
        is_complete = False
        try:
            await run.run(missing)
            is_complete = True
        finally:
            log.close(is_complete=is_complete)
        return run.report

    async def measure(self, rows: Collection[SourceRow]) -> list[RowOutcome]:
        """The outcomes of some rows, run together; nothing is written."""
        tasks = [self.make_task(row) for row in rows]
        return list(await asyncio.gather(*(self.run_row(task) for task in tasks)))

    # -------------------------------------------------------------------- rows
    def make_task(self, row: SourceRow) -> RowTask:
        """A row with its request."""
        try:
            return RowTask(row, self._requests.build(row))
        except DescantError as error:
            return RowTask(row, None, error)

    async def run_row(self, task: RowTask) -> RowOutcome:
        """The outcome of a row."""
        if task.request is None:
            assert task.error is not None
            return self.failed(task.row, task.error)
        try:
            finished = await self._engine.generate(task.request)
            if self._selector is None:
                return self._result(task.row, task.request, finished)
            # A scorer may take long.
            return await asyncio.to_thread(self._result, task.row, task.request, finished)
        except _NOT_OF_A_ROW:
            raise
        except DescantError as error:
            return self.failed(task.row, error)

    def failed(self, row: SourceRow, error: DescantError) -> RowOutcome:
        """The outcome of a row without a result."""
        return RowOutcome(row.index, {**self._names(row), "error": str(error)}, True, 0)

    def _result(self, row: SourceRow, request: Request, finished: Finished) -> RowOutcome:
        # Without scores, whose last digits depend on the rows beside it.
        completions = [
            {
                "text": completion_text(self._model.tokenizer, request, one.tokens.tolist()),
                "tokens": len(one.tokens),
                "finish_reason": one.reason,
            }
            for one in finished.hypotheses
        ]
        if self._selector is not None:
            completions = self._select(row, completions, finished)
        columns = {name: row.data[name] for name in self.job.keep_columns if name in row.data}
        record = {**self._names(row), **columns, "completions": completions}
        drafted: tuple[int, ...] = ()
        accepted: tuple[int, ...] = ()
        for one in finished.hypotheses:
            if one.speculation is not None:
                drafted = add_counts(drafted, one.speculation.drafted)
                accepted = add_counts(accepted, one.speculation.accepted)
        return RowOutcome(
            row.index,
            record,
            False,
            tokens=sum(len(one.tokens) for one in finished.hypotheses),
            drafted=drafted,
            accepted=accepted,
        )

    def _select(
        self, row: SourceRow, completions: list[dict[str, Any]], finished: Finished
    ) -> list[dict[str, Any]]:
        """The completions that the job keeps, with their scores."""
        assert self._selector is not None
        config = self._selector.config
        tokens = [one.tokens.tolist() for one in finished.hypotheses] if config.needs_tokens else []
        sums = []
        if config.needs_logprobs:
            sums = [
                float(one.logprobs.raw.double().sum())
                for one in finished.hypotheses
                if one.logprobs is not None
            ]
        return self._selector.select(row.data, completions, tokens, sums)

    def _names(self, row: SourceRow) -> dict[str, Any]:
        """How a line of output names its row."""
        return {"row": row.index} if self.job.id_column is None else {"row": row.index, "id": row.id}


class _GroupRun:
    """One attempt at a group of shards."""

    def __init__(
        self, worker: JobWorker, group: ShardGroup, folder: ShardFolder, log: AttemptLog, on_row: OnRow | None
    ) -> None:
        self._worker, self._group, self._log, self._on_row = worker, group, log, on_row
        self._manifest = folder.manifest
        self._shards = _GroupOutcomes(folder)
        self.report = GroupReport(group.first)

    async def run(self, missing: list[int]) -> None:
        """Run all rows of the missing shards: first those that an earlier attempt makes suspect."""
        earlier = self._log.open()
        worker = self._worker
        async with asyncio.TaskGroup() as tasks, worker._starting:
            if earlier.suspects or earlier.unexplained:
                for row in self._read(missing):
                    if earlier.has_failed(row.index):
                        await self._add(worker.failed(row, _worker_error()))
                    elif earlier.is_suspect(row.index):
                        await self._run_alone(row)
            rows = (row for row in self._read(missing) if not earlier.is_suspect(row.index))
            while window := await asyncio.to_thread(self._next_window, rows):
                for task in window:
                    await worker._places.acquire()
                    tasks.create_task(self._run_beside_others(task))

    def _read(self, missing: list[int]) -> Iterator[SourceRow]:
        """The rows of the missing shards; those between them are read and dropped."""
        size, shards = self._manifest.shard_rows, set(missing)
        start = self._manifest.rows_of(self._group.first).start
        count = self._manifest.rows_of(missing[-1]).stop - start
        assert self._worker._source is not None
        rows = self._worker._source.rows_at(self._group.position, start, count)
        return (row for row in rows if row.index // size in shards)

    def _next_window(self, rows: Iterator[SourceRow]) -> list[RowTask]:
        """The next rows with their requests, the longest first: rows of similar length run together.

        Shards that can run at once come before later ones, so that they are saved when their rows end.
        """
        job, size = self._worker.job, self._manifest.shard_rows
        rows_at_once = -(-job.rows_in_flight // size) * size

        def place(task: RowTask) -> tuple[int, int]:
            return task.row.index // rows_at_once, 0 if task.request is None else -len(task.request.prompt)

        return sorted(map(self._worker.make_task, itertools.islice(rows, job.window)), key=place)

    async def _run_beside_others(self, task: RowTask) -> None:
        try:
            self._log.begin(task.row.index)
            outcome = await self._worker.run_row(task)
            self._log.end(task.row.index)
        finally:
            self._worker._places.release()
        await self._add(outcome)

    async def _run_alone(self, row: SourceRow) -> None:
        """Run a row while no other one is running in this worker."""
        limit = self._worker.job.rows_in_flight
        for _ in range(limit):
            await self._worker._places.acquire()
        try:
            self._log.begin(row.index, alone=True)
            outcome = await self._worker.run_row(await asyncio.to_thread(self._worker.make_task, row))
            self._log.end(row.index)
        finally:
            for _ in range(limit):
                self._worker._places.release()
        await self._add(outcome)

    async def _add(self, outcome: RowOutcome) -> None:
        report = self.report
        self.report = report._replace(
            rows=report.rows + 1,
            failed=report.failed + outcome.is_error,
            tokens=report.tokens + outcome.tokens,
            drafted=add_counts(report.drafted, outcome.drafted) if outcome.drafted else report.drafted,
            accepted=add_counts(report.accepted, outcome.accepted) if outcome.accepted else report.accepted,
        )
        if self._on_row is not None:
            self._on_row(self._group, outcome)
        complete = self._shards.add(outcome)
        if complete is not None:  # beside the other rows: flushing to a disk takes long
            await asyncio.to_thread(self._shards.write, complete)


def _worker_error() -> DescantError:
    return DescantError(
        f"the row ended its worker process in {MAX_TRIES} tries alone: make it smaller, or report a defect"
    )
