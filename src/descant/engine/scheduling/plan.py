"""The records by which a scheduler and an engine agree on a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from descant.engine.scheduling.config import SchedulerConfig, check_priority
from descant.errors import ConfigError


@dataclass(frozen=True)
class StepPlan:
    """The work of a step, by request; the fields are in the order in which they are carried out.

    Expired, exceeded and preempted requests are not running any more when the plan is returned: their rows
    and blocks must be freed before the rest of the plan is carried out.
    """

    expired: tuple[int, ...] = ()  # their deadline has passed, waiting or running
    exceeded: tuple[int, ...] = ()  # they have outgrown the whole pool and cannot go on
    preempted: tuple[int, ...] = ()  # they wait again, with nothing cached
    admitted: tuple[int, ...] = ()  # they run from now on, first in order first
    read: Mapping[int, int] = field(default_factory=dict)  # tokens of its prompt that each request reads
    decode: tuple[int, ...] = ()  # they run one step after their prompt

    @property
    def is_idle(self) -> bool:
        """Whether no request runs in this step."""
        return not self.read and not self.decode


class RequestUsage(NamedTuple):
    """The blocks and rows of a running request after a step, and those that its next step may add."""

    blocks: int  # that it alone holds
    next_blocks: int  # that its next step may add at most
    shared_blocks: int = 0  # that it holds together with other requests


class ParkedRequest(NamedTuple):
    """The demand of reading a preempted request again: no more blocks than it held and was about to add."""

    tokens: int  # over all its rows
    blocks: int  # that it holds when it has read them


@dataclass(frozen=True)
class StepReport:
    """The result of a plan.

    `usage` need not name requests for which nothing has changed; a block that the others have let go of
    is a change. Every preempted request that had read its prompt must be in `parked`.
    """

    usage: Mapping[int, RequestUsage] = field(default_factory=dict)
    parked: Mapping[int, ParkedRequest] = field(default_factory=dict)
    ended: Collection[int] = ()  # they have finished or failed, and are freed
    skipped: Collection[int] = ()  # they were planned to run and did not: nothing of them has changed
    shared_blocks: int = 0  # blocks that several running requests hold, each counted once


class PrefixHit(NamedTuple):
    """The part of a request's tokens that is in the pool already, when it is about to be admitted."""

    tokens: int = 0  # that need not be read
    shared_blocks: int = 0  # of their blocks, those that running requests hold


# What of a waiting request's tokens is cached, by its id; called when it is about to be admitted. It must
# still be so when the plan is carried out.
PrefixLookup = Callable[[int], PrefixHit]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """A request in numbers: what it reads, how wide it gets, and what may be done to it.

    A row is a hypothesis: `rows` counts beams, returned sequences, candidates and guidance rows together. All
    rows of a request run, wait and are preempted together.
    """

    number: int
    prompt_tokens: int  # to read before the first new token, over all rows that read the prompt
    max_row_tokens: int  # of one row at most, prompt included
    rows: int = 1  # at most
    prompt_rows: int = 1  # rows that read the prompt; chunks are multiples of it
    step_tokens: int | None = None  # fed by one step after the prompt, over all rows; None: one a row
    fixed_blocks: int = 0  # held whatever its length: an encoder's memory, recurrent states
    paged: bool = True  # whether its tokens take blocks of the pool
    priority: int = 0  # lower is sooner
    deadline: float | None = None  # on the clock of `now`
    chunkable: bool = True  # whether its prompt may be read in several steps
    preemptible: bool = True  # whether it may be stopped, and read again later

    def __post_init__(self) -> None:
        check_priority(self.priority)
        if self.deadline is not None and math.isnan(self.deadline):
            raise ConfigError("deadline", "must be a time on the scheduler's clock", self.deadline)

    @property
    def tokens_per_step(self) -> int:
        """The tokens that one step after the prompt feeds, over all rows."""
        return self.rows if self.step_tokens is None else self.step_tokens

    def sure_blocks(self, config: SchedulerConfig) -> int:
        """The blocks of its prompt and of one step after it."""
        row_tokens = -(-self.prompt_tokens // self.prompt_rows) - (-self.tokens_per_step // self.rows)
        return self._blocks_at(min(row_tokens, self.max_row_tokens), config)

    def max_blocks(self, config: SchedulerConfig) -> int:
        """The blocks that it may ever hold."""
        return self._blocks_at(self.max_row_tokens, config)

    def _blocks_at(self, row_tokens: int, config: SchedulerConfig) -> int:
        """The blocks of rows of that length, which share the whole blocks of their prompt."""
        if not self.paged:
            return self.fixed_blocks
        shared = self.prompt_tokens // self.prompt_rows // config.block_size  # of one row
        rest = config.blocks_of(row_tokens - shared * config.block_size)
        return self.fixed_blocks + self.prompt_rows * shared + self.rows * rest
