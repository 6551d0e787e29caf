"""A job: its description, and how it runs on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from descant.errors import InputError
from descant.jobs.description import JobDescription
from descant.jobs.job_run import JobRun
from descant.jobs.results import JobEstimate, JobProgress, JobResult
from descant.models.loading import load

__all__ = ["Job"]


class Job(JobDescription):
    """Every row of a source through a model, each exactly once.

    `Job.from_toml(path)` reads a description from a file. The output depends on the job and the row alone:
    in float32 any number of requests in flight, any interruption and any resume give the same bytes. A run
    computes only the shards that are missing in `sink`.
    """

    def run(
        self,
        model: Any = None,
        tokenizer: Any = None,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> JobResult:
        """Run what is missing; a loaded model and its tokenizer may take the place of `Job.model`.

        `on_progress` is called after each row.
        """
        return JobRun(self, *self._load(model, tokenizer), on_progress).run()

    def estimate(self, model: Any = None, tokenizer: Any = None) -> JobEstimate:
        """The rows and shards that are missing, and their time by a few rows; nothing is written."""
        return JobRun(self, *self._load(model, tokenizer)).estimate()

    def _load(self, model: Any, tokenizer: Any) -> tuple[Any, Any]:
        if (model is None) != (tokenizer is None):
            name = "model" if model is None else "tokenizer"
            raise InputError(name, "must be given together with the other", None, "give both, or neither")
        return (model, tokenizer) if model is not None else load(self.model, self.dtype, self.device)
