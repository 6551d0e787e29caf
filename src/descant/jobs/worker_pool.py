"""Workers of a job in processes of their own, which are replaced when they end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from descant.errors import WorkerFailed
from descant.jobs.description import JobDescription
from descant.jobs.job_messages import encode_group, encode_job, encode_manifest
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import GROUPS_AT_ONCE, GroupReport, ShardGroup
from descant.jobs.workers import RowCounts, WorkerCallbacks

__all__ = ["WorkerPool"]

_MAX_ENDS: Final = 50  # of workers without a complete group between them
_MAX_EARLY_ENDS: Final = 5  # before a worker has loaded its model


@dataclass(eq=False)
class _Worker:
    """A process, and the groups that it runs."""

    process: subprocess.Popen[bytes]
    slot: int  # the smallest number that no other worker has
    digest: str | None = None
    groups: dict[int, ShardGroup] = field(default_factory=dict)

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended, as its output says

    def close(self) -> None:
        """End the process, if it runs."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # of messages that it has not read
            self.process.stdin.close()


class WorkerPool:
    """Processes that each load the job's model.

    When one ends before its time, its groups go to others, and a new one takes its place.
    """

    def __init__(self, job: JobDescription, run: str) -> None:
        self._job, self._run = job, run
        self._messages: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self._workers: list[_Worker] = []
        self._early_ends = self._ends = 0
        self._digest: str | None = None

    def digest(self) -> str:
        """The digest of everything that decides the results, by the first worker."""
        if self._digest is None:
            self._start()
            while self._digest is None:
                self._receive()
        return self._digest

    def count(self) -> int:
        """The number of processes."""
        return self._job.workers

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, callbacks: WorkerCallbacks) -> None:
        """Run all groups."""
        manifest, self._digest = encode_manifest(folder.manifest), folder.manifest.job
        waiting: deque[ShardGroup] = deque()
        for worker in self._workers:
            worker.send(manifest=manifest)
        is_exhausted = False
        while True:
            while not is_exhausted and len(waiting) < GROUPS_AT_ONCE * self._job.workers:
                group = next(groups, None)
                is_exhausted = group is None
                if group is not None:
                    waiting.append(group)
            num_running = sum(len(one.groups) for one in self._workers)
            if not waiting and not num_running:
                return
            self._assign(waiting, manifest)
            worker, message = self._receive()
            if message is None:
                for group in worker.groups.values():
                    callbacks.on_retry(group.first)
                waiting.extendleft(reversed(worker.groups.values()))
                continue
            for group_number, counts in message.get("rows", ()):
                callbacks.on_rows(group_number, RowCounts(*counts))
            if "report" in message:
                report = GroupReport(*message["report"])
                del worker.groups[report.group]
                self._ends = 0
                callbacks.on_report(report)

    def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    # -------------------------------------------------------------------- parts
    def _assign(self, waiting: deque[ShardGroup], manifest: dict[str, Any]) -> None:
        """Give waiting groups to workers, and start as many of those as can have one."""
        num_groups = len(waiting) + sum(len(one.groups) for one in self._workers)
        while len(self._workers) < min(self._job.workers, num_groups):
            self._start().send(manifest=manifest)
        for at_once in range(1, GROUPS_AT_ONCE + 1):  # first one for each
            for worker in self._workers:
                if waiting and len(worker.groups) < at_once:
                    group = waiting.popleft()
                    worker.groups[group.first] = group
                    worker.send(group=encode_group(group))

    def _start(self) -> _Worker:
        """A new process."""
        slot = min(set(range(len(self._workers) + 1)) - {one.slot for one in self._workers})
        paths = [os.path.abspath(one) if one else os.getcwd() for one in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "descant.jobs.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self._visible_gpu(slot)},
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
        worker = _Worker(process, slot)
        self._workers.append(worker)
        threading.Thread(target=self._read, args=(worker,), name="descant-worker", daemon=True).start()
        threads = self._job.cpus_per_worker or 0
        if not threads and self._job.workers > 1:
            threads = max(1, (os.cpu_count() or 1) // self._job.workers)
        worker.send(job=encode_job(self._job), run=self._run, workers=self._job.workers, threads=threads)
        return worker

    def _visible_gpu(self, slot: int) -> dict[str, str]:
        """The variable that shows a worker the GPU of its slot, where workers share several."""
        if self._job.device != "cuda" or self._job.workers == 1:
            return {}
        import torch  # the process that starts the workers needs it for nothing else

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}

    def _read(self, worker: _Worker) -> None:
        """Receive what a process says; None at its end."""
        assert worker.process.stdout is not None
        with worker.process.stdout as output:
            for line in output:
                if line.endswith(b"\n"):  # else it ended in the middle of a line
                    self._messages.put((worker, json.loads(line)))
        worker.process.wait()
        self._messages.put((worker, None))

    def _receive(self) -> tuple[_Worker, dict[str, Any] | None]:
        """The next message of a worker; None: it has ended and left the pool."""
        while True:
            worker, message = self._messages.get()
            if worker in self._workers:
                break
        if message is None:
            self._workers.remove(worker)
            worker.close()
            self._note_end(worker)
        elif "error" in message:
            raise WorkerFailed(message["error"])
        elif "digest" in message:
            if self._digest is not None and message["digest"] != self._digest:
                raise WorkerFailed("the model or its tokenizer has changed during the run")
            worker.digest = self._digest = message["digest"]
            self._early_ends = 0
        return worker, message

    def _note_end(self, worker: _Worker) -> None:
        """Raise if workers end without doing anything."""
        self._ends += 1
        self._early_ends += worker.digest is None
        code = worker.process.returncode
        if self._early_ends >= _MAX_EARLY_ENDS or self._ends >= _MAX_ENDS:
            reason = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            when = "before it had loaded its model" if worker.digest is None else "again and again"
            raise WorkerFailed(f"it ended {reason} {when}")
        if self._digest is None:
            self._start()
