"""Offline work: every row of a source through a model, each exactly once, in shards that survive a kill."""

from __future__ import annotations

from descant.jobs.description import JobEstimate, JobProgress, JobResult
from descant.jobs.job import Job
from descant.jobs.selection import SelectionConfig

__all__ = ["Job", "JobEstimate", "JobProgress", "JobResult", "SelectionConfig"]
