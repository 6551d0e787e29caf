"""What a scheduler and an engine tell each other about a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["ParkedRequest", "RequestUsage", "StepPlan", "StepReport"]


@dataclass(frozen=True)
class StepPlan:
    """What to do in a step, by request number; the fields are in the order in which they are carried out.

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
    """What a running request holds after a step, and what its next step may add."""

    blocks: int  # that it alone holds
    next_blocks: int  # that its next step may add at most
    shared_blocks: int = 0  # that it holds together with other requests
    rows: int | None = None  # that it may still have; None: as before
    step_tokens: int | None = None  # that its next step feeds at most; None: as before


class ParkedRequest(NamedTuple):
    """What reading a preempted request again takes: no more blocks than it held and was about to add."""

    tokens: int  # over all its rows
    blocks: int  # that it holds when it has read them


@dataclass(frozen=True)
class StepReport:
    """What came of a plan.

    `usage` need not name requests for which nothing has changed; a block that the others have let go of
    is a change. Every preempted request that had read its prompt must be in `parked`.
    """

    usage: Mapping[int, RequestUsage] = field(default_factory=dict)
    parked: Mapping[int, ParkedRequest] = field(default_factory=dict)
    ended: Collection[int] = ()  # they have finished or failed, and are freed
    skipped: Collection[int] = ()  # they were planned to run and did not: nothing of them has changed
    shared_blocks: int = 0  # blocks that several running requests hold, each counted once
