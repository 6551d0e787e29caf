"""The part of a trace that a picture shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from descant.errors import InputError
from descant.trace.records import RequestRecord
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["PICTURES", "TraceSelection"]

PICTURES = ("tree", "text", "processors", "speculation", "beside")


@dataclass(frozen=True)
class TraceSelection:
    """A request of a trace, one of its sequences and one of its steps; None: the last step."""

    trace: TraceData
    request: RequestRecord
    sequence: int = 0
    step: int | None = None

    @classmethod
    def of(cls, trace: TraceData, **arguments: Any) -> TraceSelection:
        """What keyword arguments name, by default the first request; InputError: the trace lacks it."""
        for name, value in arguments.items():
            if name not in ("request", "sequence", "step"):
                raise InputError(
                    name, "must be one of `request`, `sequence` and `step`", value, "leave it out"
                )
            if type(value) is not int and not (value is None and name != "sequence"):
                raise InputError(name, "must be an int", value)
        requests = list(trace.requests)
        number, sequence, selected = (arguments.get(name) for name in ("request", "sequence", "step"))
        request = trace.requests.get(next(iter(requests), -1) if number is None else number)
        if request is None:
            raise InputError("request", f"must be one of {requests}", number)
        result = trace.results.get(request.request)
        count = max(len(result.sequences), 1) if result is not None else 1
        if not 0 <= (sequence or 0) < count:
            raise InputError("sequence", f"must be from 0 to {count - 1}", sequence)
        steps = [step.step for step in trace.steps_of(request.request)]
        if selected is not None and selected not in steps:
            available = f"from {steps[0]} to {steps[-1]}" if steps else "none"
            must = f"must be a step of request {request.request}, which has {available}"
            raise InputError("step", must, selected)
        return cls(trace, request, sequence or 0, selected)

    @property
    def leaf(self) -> Node | None:
        """The last node of the sequence; before a result, of the best running one."""
        result = self.trace.results.get(self.request.request)
        if result is not None and result.sequences:
            return self.trace.tree.node(result.sequences[self.sequence].leaf)
        nodes = self.trace.tree.request_nodes(self.request.request)
        last = max((node.step for node in nodes), default=-1)
        ends = [node for node in nodes if not node.children and node.step == last] or nodes
        return max(
            ends, key=lambda node: (-math.inf if node.score is None else node.score, -node.slot), default=None
        )

    @property
    def path(self) -> list[Node]:
        """The nodes of the sequence, up to the step."""
        leaf = self.leaf
        nodes = [] if leaf is None else self.trace.tree.path_to(leaf.number)
        return [node for node in nodes if self.step is None or node.step <= self.step]
