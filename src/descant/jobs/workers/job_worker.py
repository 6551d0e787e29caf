"""A worker of a job: rows of a group of shards through one engine, their results into the shards."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from descant.api.text_output import completion_text
from descant.engine.protocol import Finished
from descant.engine.request import Request
from descant.engine.serving.async_engine import AsyncEngine
from descant.errors import DescantError, EngineClosed, EngineFull, RankError
from descant.jobs.description import JobDescription, RowCounts, RunProgress, open_source
from descant.jobs.job_model import JobModel, RowRequests
from descant.jobs.selection import CompletionSelector
from descant.jobs.shards import ATTEMPTS_FOLDER, GROUPS_AT_ONCE, ShardFolder, ShardGroup
from descant.jobs.source import JobSource, SourceRow

MAX_TRIES: Final = 2  # of a row alone


@dataclass
class EarlierAttempts:
    """The rows of a group that were running when earlier workers ended."""

    suspects: set[int] = field(default_factory=set)  # rows that were running when a worker ended
    tries: dict[int, int] = field(default_factory=dict)  # of rows that ran alone when a worker ended
    unexplained: int = 0  # ends while no row was running, as when prompts are read or a shard is written

    def has_failed(self, row: int) -> bool:
        """Whether a row is not tried again."""
        return self.tries.get(row, 0) >= MAX_TRIES

    def is_suspect(self, row: int) -> bool:
        """Whether a row runs alone; after unexplained ends every row does."""
        return row in self.suspects or self.unexplained >= MAX_TRIES


class AttemptLog:
    """A file of a group to which a worker adds a line before and after each row.

    The file outlives the worker. Only attempts of the same run count: a run that was killed says nothing
    about its rows. The lines are not flushed to the disk, since they need not survive the machine. Without a
    run nothing is written.
    """

    def __init__(self, sink: Path, group: int, run: str | None) -> None:
        self._path = sink / ATTEMPTS_FOLDER / f"group-{group:05}.log"
        self._run = run
        self._file: int | None = None

    def open(self) -> EarlierAttempts:
        """Begin an attempt; returns what is known from earlier ones."""
        if self._run is None:
            return EarlierAttempts()
        self._path.parent.mkdir(exist_ok=True)
        try:
            run, *attempts = self._path.read_text("ascii").split("\n=\n")
        except (FileNotFoundError, UnicodeDecodeError):
            run, attempts = "", []
        is_same_run = run == self._run
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if is_same_run else os.O_TRUNC | os.O_APPEND)
        self._file = os.open(self._path, flags, 0o666)
        os.write(self._file, b"\n=\n" if is_same_run else f"{self._run}\n=\n".encode())
        return _read_attempts(attempts if is_same_run else [])

    def begin(self, row: int, *, alone: bool = False) -> None:
        """Note that a row starts."""
        self._add(f"!{row}\n" if alone else f"+{row}\n")

    def end(self, row: int) -> None:
        """Note that a row has ended."""
        self._add(f"-{row}\n")

    def close(self, *, is_complete: bool) -> None:
        """End the attempt; the log of a complete group is removed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if is_complete and self._run is not None:
            self._path.unlink(missing_ok=True)

    def _add(self, line: str) -> None:
        if self._file is not None:
            os.write(self._file, line.encode())


def _read_attempts(attempts: list[str]) -> EarlierAttempts:
    """The rows that were running at the end of each attempt; all attempts in a log have ended."""
    found = EarlierAttempts()
    for attempt in attempts:
        running: dict[int, bool] = {}  # whether a row ran alone
        for line in attempt.splitlines():
            if re.fullmatch(r"[+!]\d+", line):  # a torn line counts for nothing
                running[int(line[1:])] = line[0] == "!"
            elif re.fullmatch(r"-\d+", line):
                running.pop(int(line[1:]), None)
        found.unexplained += not running
        for row, alone in running.items():
            found.suspects.add(row)
            if alone:
                found.tries[row] = found.tries.get(row, 0) + 1
    return found


_NOT_OF_A_ROW: Final = (EngineClosed, EngineFull, RankError)  # end the run: the row itself may be good


class RowTask(NamedTuple):
    """A row and its request, or why it has none."""

    row: SourceRow
    request: Request | None
    error: DescantError | None = None


class RowOutcome(NamedTuple):
    """A row's record of output, and its counts; it is an error where they say so."""

    row: int
    record: dict[str, Any]
    counts: RowCounts


OnRows = Callable[[int, RowCounts], None]  # a group's first shard, and rows of it that have ended


class JobWorker:
    """Runs groups of shards on an engine; use it in a `with` block, in one event loop.

    `run_group` may be called for `GROUPS_AT_ONCE` groups at once: their rows share the places of the engine.
    A row that was running when an earlier worker ended runs alone, and fails if it ends its worker again.
    """

    def __init__(self, model: JobModel, run: str | None = None, workers: int = 1) -> None:
        self.job: JobDescription = model.job
        self._model, self._run, self._workers = model, run, workers
        self._source: JobSource | None = None
        self._free_rows = asyncio.Semaphore(self.job.rows_in_flight)
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

    async def run_group(self, group: ShardGroup, folder: ShardFolder, on_rows: OnRows) -> None:
        """Compute what is missing of a group of shards."""
        if self._source is None:
            self._source = open_source(self.job, folder.read_source())
        # Others are of a worker that ended before it could report.
        missing, failed, _ = folder.check_shards(group.shards)
        rows = sum(len(folder.manifest.rows_of(shard)) for shard in set(group.shards) - set(missing))
        if rows:
            on_rows(group.first, RowCounts(rows, failed))
        if not missing:
            return
        log = AttemptLog(folder.path, group.first, self._run)
        is_complete = False
        try:
            await _GroupRun(self, group, folder, log, on_rows).run(missing)
            is_complete = True
        finally:
            log.close(is_complete=is_complete)

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
        return RowOutcome(row.index, {**self._names(row), "error": str(error)}, RowCounts(1, 1))

    def _result(self, row: SourceRow, request: Request, finished: Finished) -> RowOutcome:
        # Without scores, whose last digits depend on the rows beside it.
        completions = [
            {
                "text": completion_text(self._model.tokenizer, request, hypothesis.tokens.tolist()),
                "tokens": len(hypothesis.tokens),
                "finish_reason": hypothesis.reason,
            }
            for hypothesis in finished.hypotheses
        ]
        if self._selector is not None:
            completions = self._select(row, completions, finished)
        columns = {name: row.data[name] for name in self.job.keep_columns if name in row.data}
        record = {**self._names(row), **columns, "completions": completions}
        counts = RowCounts(1, tokens=sum(len(hypothesis.tokens) for hypothesis in finished.hypotheses))
        for hypothesis in finished.hypotheses:
            if (drafts := hypothesis.speculation) is not None:
                counts = counts.plus(RowCounts(drafted=drafts.drafted, accepted=drafts.accepted))
        return RowOutcome(row.index, record, counts)

    def _select(
        self, row: SourceRow, completions: list[dict[str, Any]], finished: Finished
    ) -> list[dict[str, Any]]:
        """The completions that the job keeps, with their scores."""
        assert self._selector is not None
        config = self._selector.config
        hypotheses = finished.hypotheses if config.needs_tokens else []
        tokens = [hypothesis.tokens.tolist() for hypothesis in hypotheses]
        sums = []
        if config.needs_logprobs:
            sums = [
                float(hypothesis.logprobs.raw.double().sum())
                for hypothesis in finished.hypotheses
                if hypothesis.logprobs is not None
            ]
        return self._selector.select(row.data, completions, tokens, sums)

    def _names(self, row: SourceRow) -> dict[str, Any]:
        """The fields of a line of output that name its row."""
        return {"row": row.index} if self.job.id_column is None else {"row": row.index, "id": row.id}


class _GroupRun:
    """One attempt at a group of shards."""

    def __init__(
        self, worker: JobWorker, group: ShardGroup, folder: ShardFolder, log: AttemptLog, on_rows: OnRows
    ) -> None:
        self._worker, self._group, self._log, self._on_rows = worker, group, log, on_rows
        self._folder, self._manifest = folder, folder.manifest
        self._outcomes: dict[int, dict[int, RowOutcome]] = {}  # of shards that are not complete

    async def run(self, missing: list[int]) -> None:
        """Run all rows of the missing shards: first those that an earlier attempt makes suspect."""
        earlier = self._log.open()
        worker = self._worker
        async with asyncio.TaskGroup() as tasks, worker._starting:
            if earlier.suspects or earlier.unexplained:
                for row in self._read(missing):
                    if earlier.has_failed(row.index):
                        ended = f"the row ended its worker process in {MAX_TRIES} tries alone"
                        error = DescantError(f"{ended}: make it smaller, or report a defect")
                        await self._add(worker.failed(row, error))
                    elif earlier.is_suspect(row.index):
                        await self._run_alone(row)
            rows = (row for row in self._read(missing) if not earlier.is_suspect(row.index))
            while window := await asyncio.to_thread(self._next_window, rows):
                for task in window:
                    await worker._free_rows.acquire()
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
            self._worker._free_rows.release()
        await self._add(outcome)

    async def _run_alone(self, row: SourceRow) -> None:
        """Run a row while no other one is running in this worker."""
        limit = self._worker.job.rows_in_flight
        for _ in range(limit):
            await self._worker._free_rows.acquire()
        try:
            self._log.begin(row.index, alone=True)
            outcome = await self._worker.run_row(await asyncio.to_thread(self._worker.make_task, row))
            self._log.end(row.index)
        finally:
            for _ in range(limit):
                self._worker._free_rows.release()
        await self._add(outcome)

    async def _add(self, outcome: RowOutcome) -> None:
        self._on_rows(self._group.first, outcome.counts)
        shard = outcome.row // self._manifest.shard_rows
        outcomes = self._outcomes.setdefault(shard, {})
        outcomes[outcome.row] = outcome
        if len(outcomes) == len(self._manifest.rows_of(shard)):
            # Beside the other rows: flushing to a disk takes long.
            await asyncio.to_thread(self._write, shard, [outcomes[row] for row in sorted(outcomes)])
            del self._outcomes[shard]

    def _write(self, shard: int, outcomes: list[RowOutcome]) -> None:
        results = [outcome.record for outcome in outcomes if not outcome.counts.failed]
        errors = [outcome.record for outcome in outcomes if outcome.counts.failed]
        self._folder.write(shard, results, errors)


Result = TypeVar("Result")


class LocalWorker:
    """One worker, on a model that is loaded here. A row that ends the process ends the run."""

    def __init__(self, model: JobModel, run: str | None = None) -> None:
        self._model, self._run_id = model, run

    def digest(self) -> str:
        """The digest of everything that decides the results."""
        return self._model.digest()

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, progress: RunProgress) -> None:
        """Run all groups."""
        run_coroutine(self._run(groups, folder, progress))

    def close(self) -> None:
        """Nothing to end."""

    async def _run(self, groups: Iterator[ShardGroup], folder: ShardFolder, progress: RunProgress) -> None:
        limit = asyncio.Semaphore(GROUPS_AT_ONCE)
        with JobWorker(self._model, self._run_id) as worker:

            async def run_group(group: ShardGroup) -> None:
                await worker.run_group(group, folder, progress.add)
                progress.finish(group.first)
                limit.release()

            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    await limit.acquire()
                    tasks.create_task(run_group(group))


def run_coroutine(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unwrapped(work)
    with ThreadPoolExecutor(1, thread_name_prefix="descant-job") as thread:
        return thread.submit(_unwrapped, work).result()


def _unwrapped(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine; of errors in several tasks the first is raised."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
