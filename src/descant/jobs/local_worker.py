"""The worker of a job in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from descant.jobs.job_model import JobModel
from descant.jobs.job_worker import JobWorker, RowOutcome
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import GROUPS_AT_ONCE, ShardGroup
from descant.jobs.workers import RowCounts, WorkerCallbacks

__all__ = ["LocalWorker", "run_coroutine"]

Result = TypeVar("Result")


class LocalWorker:
    """One worker, on a model that is loaded here. A row that ends the process ends the run."""

    def __init__(self, model: JobModel) -> None:
        self._model = model

    def digest(self) -> str:
        """The digest of everything that decides the results."""
        return self._model.digest()

    def count(self) -> int:
        """One."""
        return 1

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, callbacks: WorkerCallbacks) -> None:
        """Run all groups."""
        run_coroutine(self._run(groups, folder, callbacks))

    def close(self) -> None:
        """Nothing to end."""

    async def _run(
        self, groups: Iterator[ShardGroup], folder: ShardFolder, callbacks: WorkerCallbacks
    ) -> None:
        limit = asyncio.Semaphore(GROUPS_AT_ONCE)

        def on_row(group: ShardGroup, outcome: RowOutcome) -> None:
            callbacks.on_rows(group.first, RowCounts(1, int(outcome.is_error), outcome.tokens))

        with JobWorker(self._model) as worker:

            async def run_group(group: ShardGroup) -> None:
                callbacks.on_report(await worker.run_group(group, folder, on_row))
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
