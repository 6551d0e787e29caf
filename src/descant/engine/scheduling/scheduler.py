"""The interface of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import StepPlan, StepReport
from descant.engine.scheduling.scheduled_request import PrefixHit, ScheduledRequest

__all__ = ["PrefixLookup", "Scheduler"]

# What of a waiting request's tokens is cached, by its number; called when it is about to be admitted. It must
# still be so when the plan is carried out.
PrefixLookup = Callable[[int], PrefixHit]


class Scheduler(Protocol):
    """Decides which requests run in a step: `schedule` before it, `finish_step` after it.

    It never reads a clock: `now` is any time that does not go back. It is used by one thread at a time.
    """

    @property
    def config(self) -> SchedulerConfig:
        """Its limits."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests, preempted ones included."""
        ...

    @property
    def num_running(self) -> int:
        """The number of admitted requests."""
        ...

    @property
    def running_rows(self) -> int:
        """The rows that the admitted requests may have."""
        ...

    @property
    def reserved_blocks(self) -> int:
        """The blocks that the admitted requests hold or may come to hold in the next step."""
        ...

    def __contains__(self, number: object) -> bool:
        """Whether a request waits or runs."""
        ...

    def add(self, *requests: ScheduledRequest, now: float) -> None:
        """Queue requests that arrive now, all or none; raise `EngineFull` or for one that can never run."""
        ...

    def cancel(self, number: int) -> None:
        """Remove a waiting or running request between two steps."""
        ...

    def schedule(self, now: float) -> StepPlan:
        """What to do in the next step."""
        ...

    def finish_step(self, report: StepReport) -> None:
        """Take note of what came of the plan."""
        ...
