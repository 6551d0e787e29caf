"""Where a forward reads and writes in blocks with the first and the latest positions of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.prefill_buffer import PrefillBuffer

__all__ = ["SinkWindowIndex", "SinkWindowPlan"]


@dataclass
class SinkWindowPlan:
    """Where a forward writes and reads, computed once for all layers (host)."""

    span: KVSpan
    rows: Array  # [N] the rows fed
    start: Array  # [N] the first position fed
    write_start: Array  # [N] the slot of that position
    num_skipped: Array  # [N] the number of slots after the sinks that are not visible
    past_lengths: Array  # [N] the number of visible slots before the written ones
    prefill_buffer: PrefillBuffer | None  # the target of the write, if it is not a block
    is_marked: bool = False  # whether its slots are marked as written

    @cached_property
    def num_slots(self) -> int:
        """The number of visible slots."""
        return int(self.past_lengths.max(initial=0)) + self.span.width

    @cached_property
    def required_slots(self) -> int:
        """The number of slots that a block must have."""
        return int(self.write_start.max(initial=0)) + self.span.width

    @cached_property
    def common_write_start(self) -> int | None:
        """The first slot written, if all rows are fed and it is the same for all; else None."""
        return None if self.span.rows is not None else _common_value(self.write_start)

    @cached_property
    def common_skip(self) -> int | None:
        """The number of skipped slots, if it is the same for all rows; else None."""
        return _common_value(self.num_skipped)


class SinkWindowIndex(NamedTuple):
    """The indices of a plan on a device."""

    plan: SinkWindowPlan
    rows: Tensor  # [N]
    write_slots: Tensor  # [N, T]
    read_slots: Tensor  # [N, S]


def _common_value(numbers: Array) -> int | None:
    """The value that all entries have; None if they differ or there are none."""
    return int(numbers[0]) if len(numbers) and (numbers == numbers[0]).all() else None
