"""The source and the sink of a job."""

from __future__ import annotations

from descant.jobs.description import JobDescription
from descant.jobs.shard_folder import JobManifest, ShardFolder
from descant.jobs.source import JobSource

__all__ = ["open_sink", "open_source"]


def open_source(job: JobDescription, known: bytes | None = None) -> JobSource:
    """The rows of a job; of formats with columns only those that the job uses are read.

    `known` is the content that the run has scanned; None: it is that of the first reading.
    """
    return JobSource(job.source_files, job.id_column, job.source_columns, known)


def open_sink(job: JobDescription, manifest: JobManifest) -> ShardFolder:
    """The shards of a job."""
    ids = () if job.id_column is None else ("id",)
    return ShardFolder(job.sink, manifest, (*ids, *job.keep_columns))
