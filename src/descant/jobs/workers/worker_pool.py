"""Workers of a job outside this process, which are replaced when they end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from descant.errors import WorkerFailed
from descant.jobs.description import JobDescription, encode_job
from descant.jobs.results import RowCounts, RunProgress
from descant.jobs.shards import GROUPS_AT_ONCE, JobManifest, ShardFolder, ShardGroup

__all__ = ["RemoteWorker", "WorkerPool"]

_MAX_ENDS: Final = 50  # of workers without a complete group between them
_MAX_EARLY_ENDS: Final = 5  # before a worker has loaded its model

Message = dict[str, Any] | None  # None: the worker has ended


class RemoteWorker:
    """A worker outside this process, and the groups that it runs.

    It loads its model and says the `digest` of the job. Then it is told the `manifest` of the folder and runs
    groups, for which it reports `rows`, and each as `done` when all its shards are written. An `error` ends
    the run.
    """

    def __init__(self, messages: queue.Queue[tuple[RemoteWorker, Message]], slot: int = 0) -> None:
        self.messages = messages
        self.slot = slot  # the smallest number that no other worker has
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
    """A process that runs `descant.jobs.workers.worker_process`, with messages in JSON lines."""

    def __init__(
        self, messages: queue.Queue[tuple[RemoteWorker, Message]], slot: int, gpu: dict[str, str]
    ) -> None:
        super().__init__(messages, slot)
        paths = [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "descant.jobs.workers.worker_process"],
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
        slot = min(set(range(len(self._workers) + 1)) - {worker.slot for worker in self._workers})
        worker = ProcessWorker(self._messages, slot, self._visible_gpu(slot))
        threads = job.cpus_per_worker or 0
        if not threads and job.workers > 1:
            threads = max(1, (os.cpu_count() or 1) // job.workers)
        try:
            worker.send(job=encode_job(job), run=self._run, workers=job.workers, threads=threads)
        except BaseException:  # the pool does not know it yet
            worker.close()
            raise
        return worker

    def _visible_gpu(self, slot: int) -> dict[str, str]:
        """The variable that shows a worker the GPU of its slot, where workers share several."""
        if self._job.device != "cuda" or self._job.workers == 1:
            return {}
        import torch  # the process that starts the workers needs it for nothing else

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}

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
