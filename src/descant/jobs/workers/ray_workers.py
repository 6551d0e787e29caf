"""Workers of a job on Ray: actors that hold the engines, each the same worker as in a process.

A worker reads the rows of its groups and writes its shards itself. So the object store holds a few numbers a
group, a group that runs twice writes the same bytes twice, and the shards are the checkpoint. All nodes must
see the source, the sink and the model at the same paths.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from typing import Any, Final

from descant.errors import DescantError, InputError, MissingExtra, WorkerFailed
from descant.jobs.description import JobDescription, RowCounts, encode_job, job_values, open_sink
from descant.jobs.job_model import JobModel
from descant.jobs.shards import GROUPS_AT_ONCE, JobManifest, ShardGroup
from descant.jobs.workers.job_worker import JobWorker
from descant.jobs.workers.worker_pool import Message, RemoteWorker, WorkerPool

LOCAL: Final = "local"
_QUIET: Final[dict[str, Any]] = {"log_to_driver": False, "logging_level": logging.ERROR}
_START_SECONDS: Final = 600.0


class JobActor:
    """A worker in an actor; its methods return messages."""

    def __init__(self) -> None:
        self._loaded = asyncio.Event()  # calls of an async actor may begin in any order

    async def load(self, job: dict[str, Any], run: str, workers: int) -> dict[str, Any]:
        """Load the model."""
        self._model = JobModel.load(JobDescription(**job_values(job)))
        self._worker = JobWorker(self._model, run, workers).__enter__()
        self._loaded.set()
        return {"digest": self._model.digest()}

    async def open(self, manifest: JobManifest) -> dict[str, Any]:
        """Look for the folder of the groups."""
        await self._loaded.wait()
        self._folder = open_sink(self._model.job, manifest)
        if not self._folder.check():
            raise InputError("sink", "must be a folder that all nodes share", self._model.job.sink)
        return {}

    async def run_group(self, group: ShardGroup) -> dict[str, Any]:
        """Run a group; its rows are reported together."""
        total = RowCounts()

        def count(_: int, counts: RowCounts) -> None:
            nonlocal total
            total = total.plus(counts)

        await self._worker.run_group(group, self._folder, count)
        return {"rows": [(group.first, total)], "done": group.first}


class RayWorker(RemoteWorker):
    """The actor of a worker, as this process sees it."""

    def __init__(
        self,
        messages: queue.Queue[tuple[RemoteWorker, Message]],
        resources: dict[str, float],
        load: tuple[Any, ...],  # arguments of `JobActor.load`
    ) -> None:
        import ray

        super().__init__(messages)
        self._ray: Any = ray
        self._end = "without a word"
        options = {**resources, "max_concurrency": GROUPS_AT_ONCE}
        self._actor: Any = ray.remote(JobActor).options(**options).remote()
        self._call("load", *load)

    def open(self, manifest: JobManifest) -> None:
        """Tell of which folder the groups are."""
        self._call("open", manifest)

    def run_group(self, group: ShardGroup) -> None:
        """Begin a group."""
        self._call("run_group", group)

    def close(self) -> str:
        """End the actor, if it runs; returns how it has ended."""
        self._ray.kill(self._actor)
        return self._end

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the actor, whose message comes in time."""
        getattr(self._actor, method).remote(*arguments).future().add_done_callback(self._receive)

    def _receive(self, future: Any) -> None:
        error = future.exception()
        if error is None:
            self.messages.put((self, future.result()))
        elif isinstance(error, self._ray.exceptions.RayError) and not isinstance(
            error, self._ray.exceptions.RayTaskError
        ):  # the actor or its node has ended
            self._end = f"with {type(error).__name__}"
            self.messages.put((self, None))
        else:
            self.messages.put((self, {"error": _cause(error)}))


class RayWorkers(WorkerPool):
    """Actors on a Ray cluster."""

    def __init__(self, job: JobDescription, run: str, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtra("ray", "a job on Ray") from None
        if job.device is not None and ":" in job.device:
            must = "must be without a number on Ray, which chooses a GPU for each worker"
            raise InputError("device", must, job.device, f"use {job.device.partition(':')[0]}")
        super().__init__(job, run)
        self._ray: Any = ray
        self._began = time.monotonic()
        self._is_own = not ray.is_initialized()
        if self._is_own:
            self._connect(address)
        try:
            self._check_resources()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors, leave the cluster, and end one that was started here."""
        super().close()
        if self._is_own:
            self._ray.shutdown()

    # -------------------------------------------------------------------- parts
    def _connect(self, address: str) -> None:
        if address == LOCAL:
            self._ray.init(address=LOCAL, include_dashboard=False, **_QUIET)
            return
        try:
            self._ray.init(address=address, **_QUIET)
        except ConnectionError as error:
            must = f"must be the address of a Ray cluster, or {LOCAL!r} ({error})"
            raise InputError("ray", must, address, "start one with `ray start --head`") from None

    def _resources(self) -> dict[str, float]:
        """The CPUs and GPUs that a worker needs of a node."""
        job = self._job
        num_gpus = 1 if job.device == "cuda" else 0
        if job.engine != "descant" and self._ray.cluster_resources().get("GPU", 0):
            num_gpus = int(job.engine_options.get("tensor_parallel_size", 1))
        return {"num_cpus": job.cpus_per_worker or 1, "num_gpus": num_gpus}

    def _node_sizes(self, kind: str) -> list[int]:
        """The number of CPUs or GPUs of each node."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node.get("Alive", False)]
        return [int(resources.get(kind, 0)) for resources in nodes]

    def _check_resources(self) -> None:
        """Raise InputError where the workers would wait for ever."""
        for (_, wanted), kind in zip(self._resources().items(), ("CPU", "GPU"), strict=True):
            sizes = self._node_sizes(kind)
            if wanted and sum(int(size // wanted) for size in sizes) < self._job.workers:
                must = f"must fit on the cluster, whose nodes have {sizes} {kind}s, {wanted} for each"
                raise InputError("workers", must, self._job.workers, "start more nodes, or use fewer workers")

    def _new_worker(self) -> RemoteWorker:
        self._began = time.monotonic()  # of the last start: a worker that replaces another has its own time
        resources = self._resources()
        on_a_node = max(self._node_sizes("CPU")) // resources["num_cpus"]
        workers = int(max(1, min(self._job.workers, on_a_node)))
        return RayWorker(self._messages, resources, (encode_job(self._job), self._run, workers))

    def _next_message(self) -> tuple[RemoteWorker, Message]:
        """The next message; raises if none has come for a long time, as where other jobs have all CPUs."""
        while True:
            try:
                return self._messages.get(timeout=10.0)
            except queue.Empty:
                is_ready = any(worker.digest is not None for worker in self._workers)
                if is_ready or time.monotonic() - self._began < _START_SECONDS:
                    continue
            resources = self._ray.available_resources()
            free = {name: value for name, value in resources.items() if name.isupper()}
            raise WorkerFailed(f"none has begun after {_START_SECONDS:.0f} s; the cluster has {free} free")


def _cause(error: BaseException) -> str:
    """The text of the error in a worker, which Ray wraps in others."""
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    return str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
