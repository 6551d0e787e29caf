"""A job: its description, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from descant.errors import InputError
from descant.jobs.description import JobDescription
from descant.jobs.job_run import JobRun
from descant.jobs.results import JobEstimate, JobProgress, JobResult
from descant.jobs.workers.worker_pool import WorkerPool

if TYPE_CHECKING:  # they take torch, which a run that finds everything there does not need
    from descant.jobs.job_model import JobModel
    from descant.jobs.workers.job_worker import LocalWorker

__all__ = ["Job"]


class Job(JobDescription):
    """Every row of a source through a model, each exactly once.

    `Job.from_toml(path)` reads a description from a file. The output depends on the job and the row alone:
    in float32 any number of workers and of requests in flight, any interruption and any resume give the same
    bytes. A run computes only the shards that are missing in `sink`.
    """

    def run(
        self,
        model: Any = None,
        tokenizer: Any = None,
        on_progress: Callable[[JobProgress], None] | None = None,
        ray: str | None = None,
    ) -> JobResult:
        """Run what is missing, in processes of its own.

        With a loaded model and its tokenizer it runs in this process instead. `ray` is the address of a Ray
        cluster, or "local" for one that is started here and ends with the run. `on_progress` is called at the
        start and as rows end.
        """
        loaded = self._model(model, tokenizer)
        if ray is not None and loaded is not None:
            raise InputError("model", "must be loaded by the workers on Ray", "a model", "leave it out")
        run = JobRun(self)
        return run.run(lambda: self._workers(loaded, ray), on_progress, is_loaded=loaded is not None)

    def estimate(self, model: Any = None, tokenizer: Any = None) -> JobEstimate:
        """The rows and shards that are missing, and their time by a few rows; nothing is written."""
        from descant.jobs.job_model import JobModel

        return JobRun(self).estimate(self._model(model, tokenizer) or JobModel.load(self))

    def _workers(self, loaded: JobModel | None, ray: str | None) -> LocalWorker | WorkerPool:
        if ray is not None:
            from descant.jobs.workers.ray_workers import RayWorkers  # an extra

            return RayWorkers(self, uuid4().hex, ray)
        if loaded is None:
            return WorkerPool(self, uuid4().hex)
        from descant.jobs.workers.job_worker import LocalWorker

        return LocalWorker(loaded)

    def _model(self, model: Any, tokenizer: Any) -> JobModel | None:
        if (model is None) != (tokenizer is None):
            name = "model" if model is None else "tokenizer"
            raise InputError(name, "must be given together with the other", None, "give both, or neither")
        if model is not None and self.engine != "descant":
            raise InputError("model", "must be left out with vLLM, which loads its own", "a model")
        if model is None:
            return None
        from descant.jobs.job_model import JobModel

        return JobModel(self, model, tokenizer)
