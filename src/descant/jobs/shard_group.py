"""Groups of shards: the unit of work of a job's workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from descant.jobs.row_position import RowPosition, RowPositions
from descant.jobs.shard_folder import JobManifest

__all__ = ["GROUPS_AT_ONCE", "GroupReport", "ShardGroup", "add_counts", "group_shards"]

# The rows of the next group start when the last ones of a group run, so that the engine has always enough.
GROUPS_AT_ONCE: Final = 2
_GROUPS_PER_WORKER = 4


class ShardGroup(NamedTuple):
    """Consecutive shards that one worker computes, and where their rows begin in the source."""

    first: int
    num_shards: int
    position: RowPosition

    @property
    def shards(self) -> range:
        """The shards."""
        return range(self.first, self.first + self.num_shards)


class GroupReport(NamedTuple):
    """What a worker has done for a group."""

    group: int  # its first shard
    rows: int = 0  # of the group: those of shards that an earlier worker of the run has written included
    failed: int = 0
    tokens: int = 0
    drafted: tuple[int, ...] = ()  # tokens, by their index in a draft
    accepted: tuple[int, ...] = ()  # of the drafted tokens
    worker: str = ""


def add_counts(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The sums of counts, of which the shorter ends with zeros."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


def group_shards(
    missing: Sequence[int],
    manifest: JobManifest,
    positions: RowPositions,
    max_rows: int,
    workers: int,
) -> Iterator[ShardGroup]:
    """The missing shards in groups of about `max_rows` rows, or fewer where some workers would have none."""
    share = -(-len(missing) // (workers * _GROUPS_PER_WORKER)) if workers > 1 else len(missing)
    size = max(1, min(-(-max_rows // manifest.shard_rows), share))
    start = 0
    while start < len(missing):
        end = start + 1
        while end < len(missing) and end - start < size and missing[end] == missing[end - 1] + 1:
            end += 1
        first = missing[start]
        yield ShardGroup(first, end - start, positions[first])
        start = end
