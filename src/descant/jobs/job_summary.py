"""What a job writes when all shards are there: the rows of different texts, and the report."""

from __future__ import annotations

import dataclasses
import os
from itertools import chain
from typing import TYPE_CHECKING, Any

from descant.jobs.description import JobDescription
from descant.jobs.results import JobResult
from descant.jobs.shard_folder import ShardFolder
from descant.jobs.text_dedup import UniqueShards

if TYPE_CHECKING:
    from descant.jobs.job_report import ReportFacts

__all__ = ["write_summary"]

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
