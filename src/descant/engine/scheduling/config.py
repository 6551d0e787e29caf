"""The limits and the order of a scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from descant.errors import ConfigError

MAX_PRIORITY = 1_000_000
PreemptionPolicy = Literal["never", "growth", "priority"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The budgets of a step and of the KV pool, and the order in which requests share them.

    Requests are ordered by `arrival + ageing * priority`; a lower key comes first. `preemption` says who may
    be stopped and read again later: with "never" each request reserves its largest size when it is admitted;
    with "growth" the last in order gives way when the running requests outgrow the pool; with "priority" also
    when a waiting request comes before it.

    A token costs more the more tokens are before it, by attention. After `chunk_half_context` tokens of its
    prompt a chunk has half of `chunk_tokens`, so that all chunks take about the same time.
    """

    max_running_rows: int = 256
    max_step_tokens: int | None = None  # fed in one step, over all rows, chunks of prompts included
    chunk_tokens: int | None = None  # of a prompt read in one step; None: as many as the step has room for
    chunk_half_context: int | None = None  # tokens before a chunk that halve it; None: all chunks are equal
    num_blocks: int | None = None  # of the KV pool; None: no limit
    block_size: int = 16  # tokens of a block
    max_waiting: int | None = None  # waiting requests; None: no limit
    ageing: float = 1.0  # seconds of waiting that are worth one priority level
    preemption: PreemptionPolicy = "growth"
    headroom: float = 0.01  # share of the blocks that an admission leaves free while others run

    def __post_init__(self) -> None:
        check_count("max_running_rows", self.max_running_rows)
        check_count("block_size", self.block_size)
        for name in ("max_step_tokens", "chunk_tokens", "chunk_half_context", "num_blocks", "max_waiting"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, do="pass None for no limit")
        if self.chunk_half_context is not None and self.chunk_tokens is None:
            must = "must be None without `chunk_tokens`"
            raise ConfigError("chunk_half_context", must, self.chunk_half_context, "set `chunk_tokens`")
        if not _is_number(self.ageing) or not math.isfinite(self.ageing) or self.ageing < 0:
            raise ConfigError("ageing", "must be a finite number of seconds >= 0", self.ageing)
        if self.preemption not in get_args(PreemptionPolicy):
            choices = ", ".join(map(repr, get_args(PreemptionPolicy)))
            raise ConfigError("preemption", f"must be one of {choices}", self.preemption)
        if not _is_number(self.headroom) or not 0 <= self.headroom < 1:
            raise ConfigError("headroom", "must be a share of the blocks, 0 <= headroom < 1", self.headroom)

    def chunk_after(self, context: int) -> int | None:
        """The most tokens of a chunk after that many tokens of its prompt; None: no limit."""
        size, half = self.chunk_tokens, self.chunk_half_context
        return size if size is None or half is None else max(1, size * half // (half + context))

    @property
    def headroom_blocks(self) -> int:
        """The blocks that an admission leaves free while others run."""
        return math.ceil(self.headroom * self.num_blocks) if self.num_blocks is not None else 0

    def blocks_of(self, tokens: int) -> int:
        """The blocks of one row of that many tokens."""
        return -(-tokens // self.block_size)


def check_count(name: str, value: object, least: int = 1, do: str = "") -> None:
    """Raise unless a value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, f"must be an integer >= {least}", value, do)


def check_priority(value: object) -> None:
    """Raise unless a value is a priority level."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        raise ConfigError("priority", f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}", value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
