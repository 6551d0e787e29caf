"""`python -m descant.jobs.worker_process`: a worker of a job in a process of its own.

It reads messages in JSON lines from standard input, and answers on standard output:

    {"job": {...}, "run": "...", "workers": 2, "threads": 1}   ->  {"digest": "..."}
    {"manifest": {...}}                                        ->
    {"group": [...]}                                           ->  {"rows": [...]}, {"report": [...]}

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
from descant.jobs.job_files import open_sink
from descant.jobs.job_messages import decode_group, decode_job, decode_manifest
from descant.jobs.job_model import JobModel
from descant.jobs.job_worker import JobWorker, RowOutcome
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import ShardGroup

__all__ = ["main"]

_SECONDS_BETWEEN_COUNTS: Final = 0.2


class _Output:
    """Sends messages; the counts of rows go together from time to time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._counts: dict[int, list[int]] = {}
        self._next = 0.0

    def send(self, **message: Any) -> None:
        try:
            with self._lock:
                self._file.write(json.dumps(message).encode() + b"\n")
                self._file.flush()
        except BrokenPipeError:
            os._exit(0)  # the other process has ended

    def count(self, group: ShardGroup, outcome: RowOutcome) -> None:
        counts = self._counts.setdefault(group.first, [0, 0, 0])
        for index, value in enumerate((1, int(outcome.is_error), outcome.tokens)):
            counts[index] += value
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        if self._counts:
            self.send(rows=list(self._counts.items()))
        self._counts = {}
        self._next = time.monotonic() + _SECONDS_BETWEEN_COUNTS


class _Process:
    """The worker and what it is told."""

    def __init__(self, source: BinaryIO, output: _Output) -> None:
        self._source, self._output = source, output
        first = self._read()
        if first["threads"]:
            torch.set_num_threads(first["threads"])
        self._run, self._workers = first["run"], first["workers"]
        self._model = JobModel.load(decode_job(first["job"]))
        output.send(digest=self._model.digest())

    async def run(self) -> None:
        """Run groups until the input ends."""
        message = await asyncio.to_thread(self._read)
        folder = open_sink(self._model.job, decode_manifest(message["manifest"]))
        with JobWorker(self._model, self._run, self._workers, str(os.getpid())) as worker:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    message = await asyncio.to_thread(self._read)
                    group = decode_group(message["group"])
                    tasks.create_task(self._run_group(worker, group, folder))

    async def _run_group(self, worker: JobWorker, group: ShardGroup, folder: ShardFolder) -> None:
        report = await worker.run_group(group, folder, self._output.count)
        self._output.flush()
        self._output.send(report=list(report))

    def _read(self) -> dict[str, Any]:
        """The next message; the end of the input ends the process, whatever it is doing."""
        line = self._source.readline()
        if not line.endswith(b"\n"):
            os._exit(0)
        message: dict[str, Any] = json.loads(line)
        return message


def main() -> None:
    """Run the worker."""
    # Whatever prints to standard output must not come between messages.
    output = _Output(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    try:
        asyncio.run(_Process(sys.stdin.buffer, output).run())
    except (Exception, BaseExceptionGroup) as error:
        output.send(error=_error_text(error))
        os._exit(1)


def _error_text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
