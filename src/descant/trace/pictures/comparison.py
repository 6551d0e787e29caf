"""Comparison of two runs: shared prefix, different settings, results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from descant.errors import InputError
from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_bytes, format_score, pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.text_stats import MAX_DRAWN_TOKENS, mean_entropy, perplexity
from descant.trace.records import RequestRecord
from descant.trace.token_text import token_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["ComparedRun", "RunComparison", "compare_runs"]

MISSING = "–"
ComparisonRow = tuple[str, str, str]  # name, value of A, value of B


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    trace: TraceData
    selection: TraceSelection
    request: RequestRecord
    nodes: Sequence[Node]


@dataclass(frozen=True)
class RunComparison:
    """Two runs and their differences."""

    runs: tuple[ComparedRun, ComparedRun]
    num_shared_tokens: int  # length of the common prefix
    settings: Sequence[ComparisonRow]
    results: Sequence[ComparisonRow]

    def divergence_text(self) -> str:
        """Where the runs diverge, as text."""
        one, other = (len(run.nodes) for run in self.runs)
        drawn = f"; the first {MAX_DRAWN_TOKENS:,} tokens drawn" if max(one, other) > MAX_DRAWN_TOKENS else ""
        if self.num_shared_tokens == one == other:
            return f"both say the same ({pluralize(one, 'token')}){drawn}"
        if not self.num_shared_tokens:
            return f"they part at the first token{drawn}"
        shared = pluralize(self.num_shared_tokens, "token")
        return f"the first {shared} the same, they part at token {self.num_shared_tokens + 1}{drawn}"


def compare_runs(trace: TraceData, selection: TraceSelection, beside: TraceData | None) -> RunComparison:
    """Compare two traces, or two requests of one trace."""
    if beside is None and len(trace.requests) < 2:
        raise InputError(
            "beside", "must be a trace where the other has one request", beside, "give a second one"
        )
    if beside is not None:
        index = list(trace.requests).index(selection.request or 0)
        others = list(beside.requests)
        request = others[min(index, len(others) - 1)] if others else None
        second = _compared_run("B", beside, TraceSelection(request).resolve(beside))
    else:
        request = next(left for left in trace.requests if left != selection.request)
        second = _compared_run("B", trace, TraceSelection(request).resolve(trace))
    runs = (_compared_run("A", trace, selection), second)
    texts = [[join_pieces(token_pieces(run.trace, node.token or 0)) for node in run.nodes] for run in runs]
    shared = 0
    for left, right in zip(*texts, strict=False):
        if left != right:
            break
        shared += 1
    return RunComparison(runs, shared, _setting_rows(runs), _result_rows(runs))


def _compared_run(name: str, trace: TraceData, selection: TraceSelection) -> ComparedRun:
    assert selection.request is not None
    return ComparedRun(
        name, trace, selection, trace.requests[selection.request], sequence_path(trace, selection)
    )


def _setting_rows(runs: Sequence[ComparedRun]) -> list[ComparisonRow]:
    """Settings that differ."""
    settings: list[Mapping[str, Any]] = [
        {"model": run.trace.header.model, "method": run.request.method, **run.request.config} for run in runs
    ]
    names = list(dict.fromkeys([*settings[0], *settings[1]]))
    lines = [
        (name, _format_setting(settings[0].get(name)), _format_setting(settings[1].get(name)))
        for name in names
    ]
    return [line for line in lines if line[1] != line[2]]


def _format_setting(value: object) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value)


def _result_rows(runs: Sequence[ComparedRun]) -> list[ComparisonRow]:
    one, other = map(_result_figures, runs)
    lines = [(name, one[name], other[name]) for name in one]
    return [line for line in lines if {line[1], line[2]} != {MISSING}]


def _result_figures(run: ComparedRun) -> dict[str, str]:
    last = run.nodes[-1] if run.nodes else None
    steps = run.trace.steps_of(run.request.request)
    cache = max((one.cache or 0 for one in steps), default=0)
    value, mean = perplexity(run.nodes), mean_entropy(run.nodes)
    return {
        "tokens": str(len(run.nodes)),
        "ended by": MISSING if last is None or last.reason is None else last.reason,
        "perplexity": MISSING if value is None else f"{value:.2f}",
        "mean entropy, nats": MISSING if mean is None else f"{mean:.2f}",
        "score": MISSING if last is None or last.score is None else format_score(last.score),
        "steps": str(len(steps)),
        "time": f"{sum(one.seconds for one in steps):.2f} s",
        "cache, at most": format_bytes(cache) if cache else MISSING,
    }
