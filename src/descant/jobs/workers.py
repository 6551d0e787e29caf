"""What runs the groups of a job: the workers of this process, of child processes, or of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from descant.jobs.shard_folder import ShardFolder
from descant.jobs.shard_group import GroupReport, ShardGroup

__all__ = ["JobWorkers", "RowCounts", "WorkerCallbacks"]


class RowCounts(NamedTuple):
    """Rows of a group that have ended."""

    rows: int
    failed: int
    tokens: int


class WorkerCallbacks(NamedTuple):
    """Whom workers tell what they have done; all are called in one thread."""

    on_rows: Callable[[int, RowCounts], None]  # a group's first shard, and its rows since the last call
    on_retry: Callable[[int], None]  # the rows of a group that was not completed are computed again
    on_report: Callable[[GroupReport], None]


class JobWorkers(Protocol):
    """Workers of a job: they give the digest of the job, and then run its groups."""

    def digest(self) -> str:
        """The digest of everything that decides the results."""
        ...

    def count(self) -> int:
        """The number of workers."""
        ...

    def run(self, groups: Iterator[ShardGroup], folder: ShardFolder, callbacks: WorkerCallbacks) -> None:
        """Run all groups."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
