"""`python -m descant.jobs.workers.worker_process`: a worker of a job in a process of its own.

It reads messages in JSON lines from standard input, and answers on standard output:

    {"job": {...}, "run": "...", "workers": 2, "threads": 1}   ->  {"digest": "..."}
    {"manifest": {...}}                                        ->
    {"group": [...]}                                           ->  {"rows": [...]}, {"done": 0}

An `{"error": "..."}` ends it. It ends at once with its input, as when the other process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any, BinaryIO, Final

import torch

from descant.errors import DescantError
from descant.jobs.description import JobDescription, job_values, open_sink
from descant.jobs.job_model import JobModel
from descant.jobs.results import RowCounts
from descant.jobs.shards import JobManifest, ShardFolder, ShardGroup
from descant.jobs.source import RowPosition
from descant.jobs.workers.job_worker import JobWorker

__all__ = ["main"]

_SECONDS_BETWEEN_COUNTS: Final = 0.2


class _Output:
    """Sends messages; the counts of rows go together from time to time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._counts: dict[int, RowCounts] = {}
        self._next = 0.0

    def send(self, **message: Any) -> None:
        try:
            with self._lock:
                self._file.write(json.dumps(message).encode() + b"\n")
                self._file.flush()
        except BrokenPipeError:
            os._exit(0)  # the other process has ended

    def count(self, group: int, counts: RowCounts) -> None:
        self._counts[group] = self._counts.get(group, RowCounts()).plus(counts)
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        if self._counts:
            self.send(rows=list(self._counts.items()))
        self._counts = {}
        self._next = time.monotonic() + _SECONDS_BETWEEN_COUNTS


def _read() -> dict[str, Any]:
    """The next message; the end of the input ends the process, whatever it is doing."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


async def _run(output: _Output) -> None:
    """Load the model, and run groups until the input ends."""
    first = _read()
    if first["threads"]:
        torch.set_num_threads(first["threads"])
    model = JobModel.load(JobDescription(**job_values(first["job"])))
    output.send(digest=model.digest())
    message = await asyncio.to_thread(_read)
    folder = open_sink(model.job, JobManifest(**message["manifest"]))

    async def run_group(worker: JobWorker, group: ShardGroup, folder: ShardFolder) -> None:
        await worker.run_group(group, folder, output.count)
        output.flush()
        output.send(done=group.first)

    with JobWorker(model, first["run"], first["workers"]) as worker:
        async with asyncio.TaskGroup() as tasks:
            while True:
                message = await asyncio.to_thread(_read)
                number, num_shards, position = message["group"]
                group = ShardGroup(number, num_shards, RowPosition(*position))
                tasks.create_task(run_group(worker, group, folder))


def main() -> None:
    """Run the worker."""
    # Whatever prints to standard output must not come between messages.
    output = _Output(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    try:
        asyncio.run(_run(output))
    except (Exception, BaseExceptionGroup) as error:
        output.send(error=_error_text(error))
        os._exit(1)


def _error_text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
