"""The part of a trace that a picture shows."""

from __future__ import annotations

from dataclasses import dataclass

from descant.errors import InputError
from descant.trace.trace_data import TraceData

__all__ = ["PICTURES", "TraceSelection"]

PICTURES = ("tree", "text", "processors", "speculation", "beside")


@dataclass(frozen=True)
class TraceSelection:
    """A request, one of its sequences and one of its steps; None: the first request, the last step."""

    request: int | None = None
    sequence: int = 0
    step: int | None = None

    def resolve(self, trace: TraceData) -> TraceSelection:
        """The selection with an explicit request; raises InputError for what the trace does not have."""
        requests = list(trace.requests)
        request = requests[0] if self.request is None and requests else self.request
        if request is None or request not in trace.requests:
            raise InputError("request", f"must be one of {requests}", self.request)
        result = trace.results.get(request)
        count = len(result.sequences) if result is not None else 0
        if not 0 <= self.sequence < max(count, 1):
            raise InputError("sequence", f"must be from 0 to {max(count, 1) - 1}", self.sequence)
        steps = [one.step for one in trace.steps_of(request)]
        if self.step is not None and self.step not in steps:
            available = f"from {steps[0]} to {steps[-1]}" if steps else "none"
            raise InputError("step", f"must be a step of request {request}, which has {available}", self.step)
        return TraceSelection(request, self.sequence, self.step)
