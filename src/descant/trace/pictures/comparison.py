"""Two runs side by side: how far they say the same, what was set otherwise, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from descant.errors import InputError
from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_bytes, format_score, pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.text_stats import mean_entropy, perplexity
from descant.trace.records import RequestRecord
from descant.trace.token_text import token_pieces
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["ComparedRun", "RunComparison", "compare_runs"]

MISSING = "–"
ComparisonRow = tuple[str, str, str]  # a name, and what it is on either side


@dataclass(frozen=True)
class ComparedRun:
    """One of the two."""

    name: str
    trace: Trace
    selection: TraceSelection
    request: RequestRecord
    nodes: Sequence[Node]


@dataclass(frozen=True)
class RunComparison:
    """Both, and what sets them apart."""

    runs: tuple[ComparedRun, ComparedRun]
    num_shared_tokens: int  # tokens that both begin with
    settings: Sequence[ComparisonRow]
    results: Sequence[ComparisonRow]

    def divergence_text(self) -> str:
        """Where they part, in words."""
        one, other = (len(side.nodes) for side in self.runs)
        if self.num_shared_tokens == one == other:
            return f"both say the same ({pluralize(one, 'token')})"
        if not self.num_shared_tokens:
            return "they part at the first token"
        return f"the first {pluralize(self.num_shared_tokens, 'token')} the same, they part at token {self.num_shared_tokens + 1}"


def compare_runs(trace: Trace, where: TraceSelection, beside: Trace | None) -> RunComparison:
    """Of two traces, or of the first two requests of one."""
    if beside is None and len(trace.requests) < 2:
        raise InputError(
            "beside", "must be a trace where the other has one request", beside, "give a second one"
        )
    if beside is not None:
        place = list(trace.requests).index(where.request or 0)
        others = list(beside.requests)
        request = others[min(place, len(others) - 1)] if others else None
        second = _compared_run("B", beside, TraceSelection(request).resolve(beside))
    else:
        request = next(one for one in trace.requests if one != where.request)
        second = _compared_run("B", trace, TraceSelection(request).resolve(trace))
    sides = (_compared_run("A", trace, where), second)
    said = [[join_pieces(token_pieces(side.trace, node.token or 0)) for node in side.nodes] for side in sides]
    shared = 0
    for one, other in zip(*said, strict=False):
        if one != other:
            break
        shared += 1
    return RunComparison(sides, shared, _setting_rows(sides), _result_rows(sides))


def _compared_run(name: str, trace: Trace, where: TraceSelection) -> ComparedRun:
    assert where.request is not None
    return ComparedRun(name, trace, where, trace.requests[where.request], sequence_path(trace, where))


def _setting_rows(sides: Sequence[ComparedRun]) -> list[ComparisonRow]:
    """What was set in one way here and in another there."""
    known: list[Mapping[str, Any]] = [
        {"model": side.trace.header.model, "method": side.request.method, **side.request.config}
        for side in sides
    ]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    lines = [
        (name, _format_setting(known[0].get(name)), _format_setting(known[1].get(name))) for name in names
    ]
    return [line for line in lines if line[1] != line[2]]


def _format_setting(value: object) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value)


def _result_rows(sides: Sequence[ComparedRun]) -> list[ComparisonRow]:
    one, other = map(_result_figures, sides)
    lines = [(name, one[name], other[name]) for name in one]
    return [line for line in lines if {line[1], line[2]} != {MISSING}]


def _result_figures(side: ComparedRun) -> dict[str, str]:
    last = side.nodes[-1] if side.nodes else None
    of_it = side.trace.steps_of(side.request.request)
    cache = max((one.cache or 0 for one in of_it), default=0)
    value, mean = perplexity(side.nodes), mean_entropy(side.nodes)
    return {
        "tokens": str(len(side.nodes)),
        "ended by": MISSING if last is None or last.reason is None else last.reason,
        "perplexity": MISSING if value is None else f"{value:.2f}",
        "mean entropy, nats": MISSING if mean is None else f"{mean:.2f}",
        "score": MISSING if last is None or last.score is None else format_score(last.score),
        "steps": str(len(of_it)),
        "time": f"{sum(one.seconds for one in of_it):.2f} s",
        "cache, at most": format_bytes(cache) if cache else MISSING,
    }
