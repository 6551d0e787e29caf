"""Which part of a trace a picture is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from descant.errors import InputError

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["PICTURES", "TraceSelection"]

PICTURES = ("tree", "text", "processors", "speculation", "beside")


@dataclass(frozen=True)
class TraceSelection:
    """A request, one of its sequences and a step of it; None: the first request, the last step."""

    request: int | None = None
    sequence: int = 0
    step: int | None = None

    def resolve(self, trace: Trace) -> TraceSelection:
        """The same with its request named; an error for what the trace does not have."""
        known = list(trace.requests)
        request = known[0] if self.request is None and known else self.request
        if request is None or request not in trace.requests:
            raise InputError("request", f"must be one of {known}", self.request)
        result = trace.results.get(request)
        count = len(result.sequences) if result is not None else 0
        if not 0 <= self.sequence < max(count, 1):
            raise InputError("sequence", f"must be from 0 to {max(count, 1) - 1}", self.sequence)
        steps = [one.step for one in trace.steps_of(request)]
        if self.step is not None and self.step not in steps:
            got = f"from {steps[0]} to {steps[-1]}" if steps else "none"
            raise InputError("step", f"must be a step of request {request}, which has {got}", self.step)
        return TraceSelection(request, self.sequence, self.step)
