"""Workers of a job outside this process, which are replaced when they end.

`main` is the program of a process. It reads messages in JSON lines from standard input, and answers on
standard output:

    {"job": {...}, "run": "...", "workers": 2, "threads": 1}   ->  {"digest": "..."}
    {"manifest": {...}}                                        ->
    {"group": [...]}                                           ->  {"rows": [...]}, {"done": 0}

An `{"error": "..."}` ends it. It ends at once with its input, as when the other process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, Final

from descant.errors import DescantError, WorkerFailed
from descant.jobs.description import JobDescription, RowCounts, RunProgress, encode_job, job_values, open_sink
from descant.jobs.shards import GROUPS_AT_ONCE, JobManifest, ShardFolder, ShardGroup
from descant.jobs.source import RowPosition

# Not with `-m`: the package has imported this module by then.
_PROGRAM: Final = "from descant.jobs.workers.worker_pool import main; main()"
_MAX_ENDS: Final = 50  # of workers without a complete group between them
_MAX_EARLY_ENDS: Final = 5  # before a worker has loaded its model

Message = dict[str, Any] | None  # None: the worker has ended


class RemoteWorker:
    """A worker outside this process, and the groups that it runs.

    It loads its model and says the `digest` of the job. Then it is told the `manifest` of the folder and runs
    groups, for which it reports `rows`, and each as `done` when all its shards are written. An `error` ends
    the run.
    """

    def __init__(self, messages: queue.Queue[tuple[RemoteWorker, Message]], worker_id: int = 0) -> None:
        self.messages = messages
        self.worker_id = worker_id  # the smallest number that no other worker has
        self.digest: str | None = None
        self.groups: dict[int, ShardGroup] = {}  # by their first shard

    def open(self, manifest: JobManifest) -> None:
        """Tell of which folder the groups are."""
        raise NotImplementedError

    def run_group(self, group: ShardGroup) -> None:
        """Begin a group."""
        raise NotImplementedError

    def close(self) -> str:
        """End the worker, if it runs; returns how it has ended."""
        raise NotImplementedError


class ProcessWorker(RemoteWorker):
    """A process that runs `main` of this module, with messages in JSON lines."""

    def __init__(
        self, messages: queue.Queue[tuple[RemoteWorker, Message]], worker_id: int, gpu: dict[str, str]
    ) -> None:
        super().__init__(messages, worker_id)
        paths = [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **gpu},
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
        threading.Thread(target=self._read, name="descant-worker", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message; a process that has ended says so by its output."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def open(self, manifest: JobManifest) -> None:
        """Tell of which folder the groups are."""
        self.send(manifest=dataclasses.asdict(manifest))

    def run_group(self, group: ShardGroup) -> None:
        """Begin a group."""
        self.send(group=group)

    def close(self) -> str:
        """End the process, if it runs; returns how it has ended."""
        self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # of messages that it has not read
            self.process.stdin.close()
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def _read(self) -> None:
        """Receive what the process says."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                if line.endswith(b"\n"):  # else it ended in the middle of a line
                    self.messages.put((self, json.loads(line)))
        self.process.wait()
        self.messages.put((self, None))


class WorkerPool:
    """Workers that each load the job's model; by default processes.

    When one ends before its time, its groups go to others, and a new one takes its place.
    """

    def __init__(self, job: JobDescription, run: str) -> None:
        self._job, self._run = job, run
        self._messages: queue.Queue[tuple[RemoteWorker, Message]] = queue.Queue()
        self._workers: list[RemoteWorker] = []
        self._early_ends = self._ends = 0
        self._digest: str | None = None
        self._manifest: JobManifest | None = None

    def digest(self) -> str:
        """The digest of everything that decides the results, by the first worker."""
        if self._digest is None:
            self._start()
            while self._digest is None:
                self._receive()
        return self._digest

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, progress: RunProgress) -> None:
        """Run all groups."""
        self._manifest, self._digest = folder.manifest, folder.manifest.job
        for worker in self._workers:
            worker.open(self._manifest)
        waiting: deque[ShardGroup] = deque()
        while True:
            waiting.extend(islice(groups, max(0, GROUPS_AT_ONCE * self._job.workers - len(waiting))))
            if not waiting and not any(worker.groups for worker in self._workers):
                return
            self._assign(waiting)
            worker, message = self._receive()
            if message is None:
                for group in worker.groups.values():
                    progress.retry(group.first)
                waiting.extendleft(reversed(worker.groups.values()))
                continue
            for first, counts in message.get("rows", ()):
                progress.add(first, RowCounts(*counts))
            if "done" in message:
                del worker.groups[message["done"]]
                self._ends = 0
                progress.finish(message["done"])

    def close(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    # -------------------------------------------------------------------- parts
    def _assign(self, waiting: deque[ShardGroup]) -> None:
        """Start as many workers as can have a group, and give waiting groups to those that are ready."""
        num_groups = len(waiting) + sum(len(worker.groups) for worker in self._workers)
        while len(self._workers) < min(self._job.workers, num_groups):
            self._start()
        for at_once in range(1, GROUPS_AT_ONCE + 1):  # first one for each
            for worker in self._workers:
                if waiting and worker.digest is not None and len(worker.groups) < at_once:
                    group = waiting.popleft()
                    worker.groups[group.first] = group
                    worker.run_group(group)

    def _start(self) -> None:
        worker = self._new_worker()
        if self._manifest is not None:
            worker.open(self._manifest)
        self._workers.append(worker)

    def _new_worker(self) -> RemoteWorker:
        """A worker that begins to load its model."""
        job = self._job
        used = {worker.worker_id for worker in self._workers}
        worker_id = min(set(range(len(used) + 1)) - used)
        worker = ProcessWorker(self._messages, worker_id, self._visible_gpu(worker_id))
        threads = job.cpus_per_worker or 0
        if not threads and job.workers > 1:
            threads = max(1, (os.cpu_count() or 1) // job.workers)
        try:
            worker.send(job=encode_job(job), run=self._run, workers=job.workers, threads=threads)
        except BaseException:  # the pool does not know it yet
            worker.close()
            raise
        return worker

    def _visible_gpu(self, worker_id: int) -> dict[str, str]:
        """The variable that shows a worker the GPU of its id, where workers share several."""
        if self._job.device != "cuda" or self._job.workers == 1:
            return {}
        import torch  # the process that starts the workers needs it for nothing else

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[worker_id % len(gpus)]} if gpus else {}

    def _next_message(self) -> tuple[RemoteWorker, Message]:
        return self._messages.get()

    def _receive(self) -> tuple[RemoteWorker, Message]:
        """The next message of a worker; None: it has ended and left the pool."""
        worker, message = self._next_message()
        while worker not in self._workers:
            worker, message = self._next_message()
        if message is None:
            self._workers.remove(worker)
            self._note_end(worker)
        elif "error" in message:
            raise WorkerFailed(message["error"])
        elif "digest" in message:
            if self._digest is not None and message["digest"] != self._digest:
                raise WorkerFailed("the model or its tokenizer has changed, or is not the same on all nodes")
            worker.digest = self._digest = message["digest"]
            self._early_ends = 0
        return worker, message

    def _note_end(self, worker: RemoteWorker) -> None:
        """Raise if workers end without doing anything."""
        how = worker.close()
        self._ends += 1
        self._early_ends += worker.digest is None
        if self._early_ends >= _MAX_EARLY_ENDS or self._ends >= _MAX_ENDS:
            when = "before it had loaded its model" if worker.digest is None else "again and again"
            raise WorkerFailed(f"it ended {how} {when}")
        if self._digest is None:
            self._start()


# ------------------------------------------------------------------------ in the process
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
    import torch  # which a pool of processes does not need, nor what is imported below

    from descant.jobs.job_model import JobModel
    from descant.jobs.workers.job_worker import JobWorker

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
