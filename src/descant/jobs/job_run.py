"""One run of a job: what is missing goes in groups to workers, and what they report is counted."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import descant
from descant.errors import InputError
from descant.jobs.attempt_log import FOLDER
from descant.jobs.description import JobDescription
from descant.jobs.job_files import open_sink, open_source
from descant.jobs.job_summary import write_summary
from descant.jobs.known_digest import KnownDigest
from descant.jobs.results import JobEstimate, JobProgress, JobResult
from descant.jobs.shard_folder import JobManifest, ShardFolder, source_digest
from descant.jobs.shard_group import GroupReport, add_counts, group_shards
from descant.jobs.source import SourceRow, SourceSummary
from descant.jobs.workers import JobWorkers, RowCounts, WorkerCallbacks

if TYPE_CHECKING:  # they take torch, which a run that finds everything there does not need
    from descant.jobs.job_model import JobModel
    from descant.jobs.job_worker import RowOutcome

__all__ = ["JobRun"]

_MEASURED_ROWS: Final = 16
_NONE: Final = RowCounts(0, 0, 0)


@dataclass
class _RunProgress:
    """What a run has done, by complete groups and by the rows of the others."""

    rows: int
    earlier: int  # rows of earlier runs
    earlier_failed: int
    in_flight: int
    damaged_files: tuple[str, ...]
    on_progress: Callable[[JobProgress], None] | None
    began: float = field(default_factory=time.monotonic)
    complete: RowCounts = _NONE
    running: dict[int, RowCounts] = field(default_factory=dict)
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def add(self, group: int, counts: RowCounts) -> None:
        """Count rows of a group that is not complete."""
        self.running[group] = _add(self.running.get(group, _NONE), counts)
        self.tell()

    def retry(self, group: int) -> None:
        """Forget the rows of a group that is computed again; their tokens were generated all the same."""
        tokens = self.running.pop(group, _NONE).tokens
        self.complete = _add(self.complete, RowCounts(0, 0, tokens))

    def finish(self, report: GroupReport) -> None:
        """Count a complete group."""
        self.running.pop(report.group, None)
        self.complete = _add(self.complete, RowCounts(report.rows, report.failed, report.tokens))
        self.drafted = add_counts(self.drafted, report.drafted)
        self.accepted = add_counts(self.accepted, report.accepted)

    @property
    def total(self) -> RowCounts:
        """The rows of this run."""
        found = self.complete
        for counts in self.running.values():
            found = _add(found, counts)
        return found

    def tell(self) -> None:
        """Report the state."""
        if self.on_progress is None:
            return
        total = self.total
        self.on_progress(
            JobProgress(
                rows=self.rows,
                finished=self.earlier + total.rows,
                failed=self.earlier_failed + total.failed,
                computed=total.rows,
                tokens=total.tokens,
                seconds=time.monotonic() - self.began,
                in_flight=self.in_flight,
                damaged_files=self.damaged_files,
            )
        )


def _add(one: RowCounts, other: RowCounts) -> RowCounts:
    return RowCounts(one.rows + other.rows, one.failed + other.failed, one.tokens + other.tokens)


class JobRun:
    """Runs a job with workers."""

    def __init__(self, job: JobDescription) -> None:
        self.job = job
        self._source = open_source(job)

    def run(
        self,
        start_workers: Callable[[], JobWorkers],
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
            def workers() -> JobWorkers:
                return stack.enter_context(contextlib.closing(start_workers()))

            digest = (known and known.read()) or workers().digest()
            folder = open_sink(self.job, self._manifest(digest, summary))
            stack.enter_context(folder.open(summary.content))
            if known is not None:
                known.write(digest)
            progress, failed = self._compute(folder, summary, workers, on_progress)
            shutil.rmtree(folder.path / FOLDER, ignore_errors=True)
            total = progress.total
            result = JobResult(
                rows=summary.rows,
                failed=failed,
                shards=folder.manifest.shards,
                computed_rows=total.rows,
                tokens=total.tokens,
                seconds=time.monotonic() - began,
                drafted=progress.drafted,
                accepted=progress.accepted,
                damaged_files=progress.damaged_files,
            )
            return write_summary(self.job, folder, result)

    def _compute(
        self,
        folder: ShardFolder,
        summary: SourceSummary,
        workers: Callable[[], JobWorkers],
        on_progress: Callable[[JobProgress], None] | None,
    ) -> tuple[_RunProgress, int]:
        """Compute the missing shards; returns what was done, and the number of rows without a result."""
        job, manifest, found = self.job, folder.manifest, folder.check_shards()
        num_missing = sum(len(manifest.rows_of(shard)) for shard in found.missing)
        progress = _RunProgress(
            rows=manifest.rows,
            earlier=manifest.rows - num_missing,
            earlier_failed=found.failed_rows,
            in_flight=min(num_missing, job.rows_in_flight * job.workers),
            damaged_files=tuple(folder.results_file(shard).name for shard in found.damaged),
            on_progress=on_progress,
        )
        progress.tell()
        if found.missing:
            max_rows = max(job.window, job.rows_in_flight)
            groups = group_shards(found.missing, manifest, summary.positions, max_rows, job.workers)
            callbacks = WorkerCallbacks(progress.add, progress.retry, progress.finish)
            workers().run(groups, folder, callbacks)
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
        from descant.jobs.local_worker import run_coroutine

        seconds, outcomes = run_coroutine(_measure(model, measured)) if measured else (0.0, [])
        tokens = sum(one.tokens for one in outcomes)
        return JobEstimate(
            rows=manifest.rows,
            missing_rows=num_missing,
            shards=manifest.shards,
            missing_shards=len(missing),
            measured_rows=count,
            failed_rows=sum(one.is_error for one in outcomes),
            tokens_per_second=tokens / seconds if seconds else 0.0,
            seconds=seconds * num_missing / count if count else 0.0,
            fitting_workers=model.fitting_workers(),
        )

    def _manifest(self, digest: str, summary: SourceSummary) -> JobManifest:
        job = self.job
        source = source_digest(summary.content)
        return JobManifest(descant.__version__, digest, source, summary.rows, job.shard_rows, job.sink_format)


def _missing_row(missing: Sequence[int], manifest: JobManifest, number: int) -> int:
    """The index of the missing row with a number; only the last shard of a source has fewer rows."""
    shard, offset = divmod(number, manifest.shard_rows)
    return manifest.rows_of(missing[shard])[offset]


async def _measure(model: JobModel, rows: list[SourceRow]) -> tuple[float, list[RowOutcome]]:
    from descant.jobs.job_worker import JobWorker

    with JobWorker(model) as worker:
        began = time.monotonic()
        outcomes = await worker.measure(rows)
        return time.monotonic() - began, outcomes
