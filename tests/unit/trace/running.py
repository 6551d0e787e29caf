"""Requests run with and without a tracer, and checks of the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from descant import Failed, Finished, Hypothesis, Request, Session, Trace, Tracer

Found = dict[int, list[Hypothesis] | str]  # sequences, or the error, by request


def run(
    model: Any,
    requests: Sequence[Request],
    tracer: Tracer | None = None,
    later: Sequence[Request] = (),
    cancelled: Sequence[int] = (),
) -> Found:
    """What becomes of requests; some are admitted after two steps, and some cancelled after three."""
    session = Session(model, trace=tracer)
    session.admit(*requests)
    found: Found = {}
    steps = 0
    while len(session):
        if steps == 2 and later:
            session.admit(*later)
        if steps == 3:
            for number in cancelled:
                if number not in found:
                    session.cancel(number)
                    found[number] = "cancelled"
        for event in session.step():
            if isinstance(event, Finished):
                found[event.request] = event.hypotheses
            elif isinstance(event, Failed):
                found[event.request] = str(event.error)
        steps += 1
    return found


def plain_values(found: Found) -> dict[int, Any]:
    """The same as plain values that can be compared."""
    return {
        number: some
        if isinstance(some, str)
        else [
            (one.tokens.tolist(), one.reason, one.score, one.beam_indices, one.unmet_constraints)
            for one in some
        ]
        for number, some in sorted(found.items())
    }


def check(trace: Trace, found: Mapping[int, list[Hypothesis] | str]) -> None:
    """What a trace returns, replays and has in its tree is what was found."""
    assert trace.requests.keys() == found.keys()
    assert trace.results.keys() == found.keys()
    returned: dict[int, Any] = {}
    ends: dict[int, Any] = {}  # by node
    for moment in trace.replay():
        over = {one for one in moment.returned_sequences if trace.results[one].error != "cancelled"}
        assert {one.request for one in moment.rows}.isdisjoint(over)
        for one in moment.finished_rows:
            ends[one.node] = one
        for one in (*moment.rows, *moment.finished_rows):
            path = trace.tree.path_to(one.node)
            assert tuple(node.token for node in path) == one.tokens
            assert len({node.request for node in path} | {one.request}) == 1
        returned |= moment.returned_sequences
    assert returned.keys() == found.keys()
    for number, some in found.items():
        result = trace.results[number]
        assert result.sequences == returned[number]
        if isinstance(some, str):
            assert (result.error, result.sequences) == (some, ())
            continue
        assert [(list(one.tokens), one.reason, one.unmet) for one in result.sequences] == [
            (one.tokens.tolist(), one.reason, one.unmet_constraints) for one in some
        ]
        for said, one in zip(result.sequences, some, strict=True):
            assert ends[said.leaf].tokens == said.tokens
            assert ends[said.leaf].reason == said.reason
            assert (said.score is None) == (one.score is None or not math.isfinite(one.score))
            assert said.score is None or abs(said.score - one.score) < 1e-3
