"""What a scheduler knows of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from descant.engine.scheduling.config import SchedulerConfig, check_count, check_priority
from descant.errors import ConfigError

__all__ = ["PrefixHit", "ScheduledRequest"]


class PrefixHit(NamedTuple):
    """What of a request's tokens is in the pool already, when it is about to be admitted."""

    tokens: int = 0  # that need not be read
    shared_blocks: int = 0  # of their blocks, those that running requests hold


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
        check_count("number", self.number, least=0)
        for name in ("prompt_tokens", "max_row_tokens", "rows", "prompt_rows"):
            check_count(name, getattr(self, name))
        check_count("fixed_blocks", self.fixed_blocks, least=0)
        row_tokens = -(-self.prompt_tokens // self.prompt_rows)
        if self.max_row_tokens < row_tokens:
            must = f"must be at least the {row_tokens} tokens of the prompt"
            raise ConfigError("max_row_tokens", must, self.max_row_tokens)
        if self.prompt_rows > self.rows:
            raise ConfigError("prompt_rows", f"must be at most the {self.rows} rows", self.prompt_rows)
        if self.step_tokens is not None:
            check_count("step_tokens", self.step_tokens, least=self.rows)
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
