"""Workers of a job on Ray: actors hold the engines; Ray Data schedules groups of shards and retries them.

A row of the dataset is a group of shards, not a row of the source: a worker reads the rows of its group and
writes its shards itself. So the object store holds a few numbers a group, a task that runs twice writes the
same bytes twice, and the shards are the checkpoint. All nodes must see the source, the sink and the model at
the same paths.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from descant.errors import DescantError, InputError, MissingExtra, WorkerFailed
from descant.jobs.attempt_log import FOLDER
from descant.jobs.description import JobDescription
from descant.jobs.job_files import open_sink
from descant.jobs.job_messages import decode_job, decode_manifest, encode_job, encode_manifest
from descant.jobs.job_model import JobModel
from descant.jobs.job_worker import JobWorker
from descant.jobs.row_position import RowPosition
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import GROUPS_AT_ONCE, GroupReport, ShardGroup
from descant.jobs.workers import RowCounts, WorkerCallbacks

__all__ = ["RayWorkers"]

LOCAL: Final = "local"
_QUIET: Final[dict[str, Any]] = {"log_to_driver": False, "logging_level": logging.ERROR}
_COLUMNS: Final = ("first", "num_shards", *RowPosition._fields)
_MAX_BLOCKS: Final = 10_000  # Ray keeps some kilobytes for each in the process that starts the job
_START_SECONDS: Final = 600.0


class RayActor:
    """A worker in an actor of Ray Data."""

    def __init__(self, job: Mapping[str, Any], manifest: Mapping[str, Any], run: str, workers: int) -> None:
        model = JobModel.load(decode_job(job))
        self._folder = open_sink(model.job, decode_manifest(manifest))
        if not self._folder.check():
            must = "must be a folder that all nodes share"
            raise InputError("sink", must, model.job.sink)
        if model.digest() != self._folder.manifest.job:
            raise InputError("model", "must be the same on all nodes", model.job.model)
        name = f"{os.uname().nodename}-{os.getpid()}"
        self._worker = JobWorker(model, run, workers, name).__enter__()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run a group; its report is the result."""
        first, num_shards, *position = (int(batch[name][0]) for name in _COLUMNS)
        group = ShardGroup(first, num_shards, RowPosition(*position))
        report = await self._worker.run_group(group, self._folder)
        return {"report": np.array([json.dumps(report)])}


class RayWorkers:
    """Actors on a Ray cluster."""

    def __init__(self, job: JobDescription, run: str, address: str) -> None:
        try:
            import ray
            import ray.data
        except ImportError:
            raise MissingExtra("ray", "a job on Ray") from None
        if job.device is not None and ":" in job.device:
            must = "must be without a number on Ray, which chooses a GPU for each worker"
            raise InputError("device", must, job.device, f"use {job.device.partition(':')[0]}")
        self._ray: Any = ray
        self._job, self._run = job, run
        self._is_stopped = threading.Event()
        self._is_own = not ray.is_initialized()
        if self._is_own:
            self._connect(address)
        try:
            self._check_resources()
        except BaseException:
            self.close()
            raise

    def digest(self) -> str:
        """The digest of everything that decides the results, by a task on the cluster."""
        task = self._ray.remote(_job_digest).options(**self._resources())
        with _worker_errors():
            digest: str = self._ray.get(task.remote(encode_job(self._job)))
        return digest

    def count(self) -> int:
        """The number of actors."""
        return self._job.workers

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, callbacks: WorkerCallbacks) -> None:
        """Run all groups."""
        began = time.time()
        reports: queue.Queue[GroupReport | BaseException | None] = queue.Queue()
        thread = threading.Thread(
            target=self._consume, args=(groups, folder, reports), name="descant-ray", daemon=True
        )
        thread.start()
        try:
            while True:
                try:
                    report = reports.get(timeout=10.0)
                except queue.Empty:
                    self._check_started(folder, began)
                    continue
                if isinstance(report, BaseException):
                    raise report
                if report is None:
                    return
                callbacks.on_rows(report.group, RowCounts(report.rows, report.failed, report.tokens))
                callbacks.on_report(report)
        finally:
            self._is_stopped.set()

    def close(self) -> None:
        """Leave the cluster, and end one that was started here."""
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
        """What a worker needs of a node."""
        job = self._job
        num_gpus = 1 if job.device == "cuda" else 0
        if job.engine != "descant" and self._ray.cluster_resources().get("GPU", 0):
            num_gpus = int(job.engine_options.get("tensor_parallel_size", 1))
        return {"num_cpus": job.cpus_per_worker or 1, "num_gpus": num_gpus}

    def _check_resources(self) -> None:
        """Raise InputError where the workers would wait for ever."""
        wanted = self._resources()
        for name, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            sizes = [
                int(node["Resources"].get(kind, 0)) for node in self._ray.nodes() if node.get("Alive", False)
            ]
            places = sum(int(size // wanted[name]) for size in sizes) if wanted[name] else None
            if places is not None and places < self._job.workers:
                must = f"must fit on the cluster, whose nodes have {sizes} {kind}s, {wanted[name]} for each"
                raise InputError("workers", must, self._job.workers, "start more nodes, or use fewer workers")

    def _workers_of_a_node(self) -> int:
        """The most workers that a node may run."""
        cpus = self._resources()["num_cpus"]
        sizes = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node.get("Alive", False)]
        return int(max(1, min(self._job.workers, max(sizes) // cpus)))

    def _consume(
        self,
        groups: Iterator[ShardGroup],
        folder: ShardFolder,
        reports: queue.Queue[GroupReport | BaseException | None],
    ) -> None:
        """Run the dataset, and hand over each report as it comes."""
        data = self._ray.data
        try:
            with _worker_errors(), _quiet(data.DataContext.get_current()):
                dataset = data.from_arrow(_blocks(groups)).map_batches(
                    RayActor,
                    fn_constructor_args=(
                        encode_job(self._job),
                        encode_manifest(folder.manifest),
                        self._run,
                        self._workers_of_a_node(),
                    ),
                    batch_size=1,
                    compute=data.ActorPoolStrategy(
                        min_size=1,
                        max_size=self._job.workers,
                        max_tasks_in_flight_per_actor=2 * GROUPS_AT_ONCE,
                        max_concurrent_calls_per_actor=GROUPS_AT_ONCE,
                    ),
                    **self._resources(),
                )
                for batch in dataset.iter_batches(batch_size=1, prefetch_batches=0):
                    if self._is_stopped.is_set():
                        break  # which ends the dataset; the cluster may be used on
                    reports.put(GroupReport(*json.loads(str(batch["report"][0]))))
            reports.put(None)
        except BaseException as error:
            reports.put(error)

    def _check_started(self, folder: ShardFolder, began: float) -> None:
        """Raise if no worker has begun after a long time, as where other jobs have all CPUs."""
        has_begun = (folder.path / FOLDER).exists()
        if not has_begun and time.time() - began > _START_SECONDS:
            free = {name: value for name, value in self._ray.available_resources().items() if name.isupper()}
            raise WorkerFailed(f"none has begun after {_START_SECONDS:.0f} s; the cluster has {free} free")


def _job_digest(job: Mapping[str, Any]) -> str:
    return JobModel.load(decode_job(job)).digest()


def _blocks(groups: Iterator[ShardGroup]) -> list[Any]:
    """The groups as tables, each of which is a task."""
    import pyarrow as pa

    rows = np.array([(one.first, one.num_shards, *one.position) for one in groups], dtype=np.int64)
    size = -(-len(rows) // _MAX_BLOCKS)
    table = pa.table({name: rows[:, index] for index, name in enumerate(_COLUMNS)})
    return [table.slice(start, size) for start in range(0, len(rows), size)]


@contextlib.contextmanager
def _worker_errors() -> Iterator[None]:
    """Turn an error of Ray into one that says what happened in the worker."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while (inner := getattr(cause, "cause", None) or cause.__cause__) is not None and inner is not cause:
            cause = inner
        if cause is error and isinstance(error, DescantError):  # of this process
            raise
        text = str(cause) if isinstance(cause, DescantError) else f"{type(cause).__name__}: {cause}"
        raise WorkerFailed(text) from error


@contextlib.contextmanager
def _quiet(context: Any) -> Iterator[None]:
    """Without the progress bars and messages of Ray Data, beside those of the job."""
    before, logger = context.enable_progress_bars, logging.getLogger("ray.data")
    level = logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before
        logger.setLevel(level)
