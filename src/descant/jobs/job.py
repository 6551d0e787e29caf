"""A job: its description, and its runs, in which workers compute what is missing, in groups of shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import descant
from descant.core.atomic_file import write_text
from descant.errors import InputError
from descant.jobs.description import (
    JobDescription,
    JobEstimate,
    JobProgress,
    JobResult,
    RowCounts,
    RunProgress,
    encode_job,
    open_sink,
    open_source,
)
from descant.jobs.shards import (
    ATTEMPTS_FOLDER,
    JobManifest,
    ShardFolder,
    UniqueShards,
    group_shards,
)
from descant.jobs.source import SourceRow, SourceSummary
from descant.jobs.source_files import content_digest
from descant.jobs.workers.worker_pool import WorkerPool

if TYPE_CHECKING:  # they take torch, which a run that finds everything there does not need
    from descant.jobs.job_model import JobModel
    from descant.jobs.job_report import ReportFacts
    from descant.jobs.workers.job_worker import LocalWorker, RowOutcome


UNIQUE = "unique"
REPORT = "report.html"


def write_summary(job: JobDescription, folder: ShardFolder, result: JobResult) -> JobResult:
    """Write what the job asks for; returns the result with what was counted."""
    shards = range(folder.manifest.shards)
    if job.dedup is not None:
        unique = UniqueShards(
            [folder.results_file(shard) for shard in shards], folder.results_format, folder.path / UNIQUE
        )
        counts = unique.write(job.dedup, folder.read_identity())
        result = dataclasses.replace(result, unique_rows=counts.unique)
    if job.report and (result.computed_rows or not (folder.path / REPORT).exists()):
        from descant.jobs.job_report import write_report  # most runs of a finished job need none

        results = chain.from_iterable(map(folder.read_results, shards))
        errors = chain.from_iterable(map(folder.read_errors, shards))
        write_report(folder.path / REPORT, _facts(job, result), results, errors)
    return result


def _facts(job: JobDescription, result: JobResult) -> ReportFacts:
    from descant.jobs.job_report import ReportFacts

    settings: dict[str, Any] = dict(job.generation_config.to_diff_dict())
    if job.select is not None:
        settings["select"] = {name: value for name, value in vars(job.select).items() if value is not None}
    return ReportFacts(
        title=os.path.basename(os.path.abspath(job.sink)),
        model=job.model,
        source=job.source_files,
        rows=result.rows,
        settings=settings,
        unique_rows=result.unique_rows,
        generated_tokens=result.tokens or None,
        seconds=result.seconds if result.computed_rows else None,
        drafted=result.drafted,
        accepted=result.accepted,
    )


NAME: Final = ".job.json"
# These change no result, or are in the manifest by themselves.
_NOT_COMPARED: Final = (
    *("source", "sink", "shard_rows", "sink_format", "window", "max_in_flight", "workers", "cpus_per_worker"),
    *("dedup", "report"),
)


class KnownDigest:
    """A note in the sink: the digest of the job, and the state of the files that it was computed from.

    A file is unchanged by its size, its number, and both times of its last change, of which a user can set
    back only one. Anything else, a model on the Hub, or a watermark, whose key must not be guessed from a
    note, makes the digest unknown: then the model is loaded.
    """

    def __init__(self, job: JobDescription) -> None:
        self._path = Path(job.sink) / NAME
        self._state: str | None = None
        if os.path.exists(job.model) and job.generation_config.watermarking_config is None:
            values = {name: value for name, value in encode_job(job).items() if name not in _NOT_COMPARED}
            scorer = None if job.select is None else job.select.digest_parts()
            parts = [descant.__version__, values, scorer, sorted(_file_states(job.model))]
            text = json.dumps(parts, sort_keys=True, default=repr)
            self._state = content_digest(text.encode()).hex()

    def read(self) -> str | None:
        """The digest; None: it is unknown."""
        try:
            found = json.loads(self._path.read_bytes())
            digest = found["job"] if found["state"] == self._state else None
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return digest if isinstance(digest, str) else None

    def write(self, digest: str) -> None:
        """Note the digest."""
        if self._state is not None and self.read() != digest:
            write_text(self._path, json.dumps({"state": self._state, "job": digest}) + "\n")


def _file_states(model: str) -> Iterator[list[str | int]]:
    """The names and states of the files of a model: a folder, or one file."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(model) for name in names]
    for path in files or [model]:
        found = os.stat(path)
        yield [path, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


_MEASURED_ROWS: Final = 16


class JobRun:
    """Runs a job with workers."""

    def __init__(self, job: JobDescription) -> None:
        self.job = job
        self._source = open_source(job)

    def run(
        self,
        start_workers: Callable[[], LocalWorker | WorkerPool],
        on_progress: Callable[[JobProgress], None] | None = None,
        *,
        is_loaded: bool = True,
    ) -> JobResult:
        """Compute the missing shards; without a loaded model, workers start only if there are some."""
        began = time.monotonic()
        known = None if is_loaded else KnownDigest(self.job)
        summary = self._source.scan(self.job.shard_rows)
        with contextlib.ExitStack() as stack:

            @functools.cache
            def workers() -> LocalWorker | WorkerPool:
                return stack.enter_context(contextlib.closing(start_workers()))

            digest = (known and known.read()) or workers().digest()
            folder = open_sink(self.job, self._manifest(digest, summary))
            stack.enter_context(folder.open(summary.content))
            if known is not None:
                known.write(digest)
            progress, failed = self._compute(folder, summary, workers, on_progress)
            shutil.rmtree(folder.path / ATTEMPTS_FOLDER, ignore_errors=True)
            total = progress.complete
            result = JobResult(
                rows=summary.rows,
                failed=failed,
                shards=folder.manifest.shards,
                computed_rows=total.rows,
                tokens=total.tokens,
                seconds=time.monotonic() - began,
                drafted=tuple(total.drafted),
                accepted=tuple(total.accepted),
                damaged_files=progress.start.damaged_files,
            )
            return write_summary(self.job, folder, result)

    def _compute(
        self,
        folder: ShardFolder,
        summary: SourceSummary,
        workers: Callable[[], LocalWorker | WorkerPool],
        on_progress: Callable[[JobProgress], None] | None,
    ) -> tuple[RunProgress, int]:
        """Compute the missing shards; returns what was done, and the number of rows without a result."""
        job, manifest, found = self.job, folder.manifest, folder.check_shards()
        num_missing = sum(len(manifest.rows_of(shard)) for shard in found.missing)
        start = JobProgress(
            rows=manifest.rows,
            finished=manifest.rows - num_missing,
            failed=found.failed_rows,
            computed=0,
            tokens=0,
            seconds=0.0,
            in_flight=min(num_missing, job.rows_in_flight * job.workers),
            damaged_files=tuple(folder.results_file(shard).name for shard in found.damaged),
        )
        progress = RunProgress(start, on_progress)
        progress.tell()
        if found.missing:
            max_rows = max(job.window, job.rows_in_flight)
            groups = group_shards(found.missing, manifest, summary.positions, max_rows, job.workers)
            workers().run(groups, folder, progress)
            self._source.check()
            found = folder.check_shards()
            if found.missing:
                names = ", ".join(folder.results_file(shard).name for shard in found.missing)
                must = "must not be changed by others during a run"
                raise InputError("sink", must, names, "run the job again to compute these shards")
        return progress, found.failed_rows

    def estimate(self, model: JobModel) -> JobEstimate:
        """The size of the job and the time of its missing rows, by some that are computed and not kept."""
        summary = self._source.scan(self.job.shard_rows)
        manifest = self._manifest(model.digest(), summary)
        folder = open_sink(self.job, manifest)
        folder.check()
        missing = folder.check_shards().missing
        num_missing = sum(len(manifest.rows_of(shard)) for shard in missing)
        count = min(num_missing, _MEASURED_ROWS, self.job.rows_in_flight)
        # Spread over the missing rows: a source may be sorted by length.
        chosen = {_missing_row(missing, manifest, number * num_missing // count) for number in range(count)}
        measured = [row for row in self._source if row.index in chosen] if chosen else []
        from descant.jobs.workers.job_worker import run_coroutine

        seconds, outcomes = run_coroutine(_measure(model, measured)) if measured else (0.0, [])
        counts = functools.reduce(RowCounts.plus, (outcome.counts for outcome in outcomes), RowCounts())
        return JobEstimate(
            rows=manifest.rows,
            missing_rows=num_missing,
            shards=manifest.shards,
            missing_shards=len(missing),
            measured_rows=count,
            failed_rows=counts.failed,
            tokens_per_second=counts.tokens / seconds if seconds else 0.0,
            seconds=seconds * num_missing / count if count else 0.0,
            fitting_workers=model.fitting_workers(),
        )

    def _manifest(self, digest: str, summary: SourceSummary) -> JobManifest:
        job = self.job
        source = content_digest(summary.content).hex()
        return JobManifest(descant.__version__, digest, source, summary.rows, job.shard_rows, job.sink_format)


def _missing_row(missing: Sequence[int], manifest: JobManifest, number: int) -> int:
    """The index of the missing row with a number; only the last shard of a source has fewer rows."""
    shard, offset = divmod(number, manifest.shard_rows)
    return manifest.rows_of(missing[shard])[offset]


async def _measure(model: JobModel, rows: list[SourceRow]) -> tuple[float, list[RowOutcome]]:
    from descant.jobs.workers.job_worker import JobWorker

    with JobWorker(model) as worker:
        began = time.monotonic()
        outcomes = await worker.measure(rows)
        return time.monotonic() - began, outcomes


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
