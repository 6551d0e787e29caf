"""Draft tokens along a sequence, accepted and rejected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final

from descant.errors import InputError
from descant.tokenization.display import TextPiece, join_pieces
from descant.trace.pictures.cells import (
    clip_pieces,
    format_bytes,
    format_nats,
    format_percent,
    format_score,
    pieces_width,
    pluralize,
    probability,
)
from descant.trace.pictures.text import MAX_DRAWN_TOKENS, LayoutToken, mean_entropy, node_tokens, perplexity
from descant.trace.records import ChoiceRecord, RequestRecord, RowRecord, TokenShift
from descant.trace.trace_data import Node, TraceData, TraceSelection, token_pieces

MISSING = "–"
ComparisonRow = tuple[str, str, str]  # name, value of A, value of B


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    trace: TraceData
    request: RequestRecord
    nodes: Sequence[Node]

    @classmethod
    def of(cls, name: str, selection: TraceSelection) -> ComparedRun:
        """The run of a selected sequence."""
        return cls(name, selection.trace, selection.request, selection.path)


@dataclass(frozen=True)
class RunComparison:
    """Two runs and their differences."""

    runs: tuple[ComparedRun, ComparedRun]
    num_shared_tokens: int  # length of the common prefix
    settings: Sequence[ComparisonRow]
    results: Sequence[ComparisonRow]

    def divergence_text(self) -> str:
        """Where the runs diverge, as text."""
        counts = [len(run.nodes) for run in self.runs]
        drawn = f"; the first {MAX_DRAWN_TOKENS:,} tokens drawn" if max(counts) > MAX_DRAWN_TOKENS else ""
        shared = pluralize(self.num_shared_tokens, "token")
        if set(counts) == {self.num_shared_tokens}:
            return f"both say the same ({shared}){drawn}"
        if not self.num_shared_tokens:
            return f"they part at the first token{drawn}"
        return f"the first {shared} the same, they part at token {self.num_shared_tokens + 1}{drawn}"


def compare_runs(selection: TraceSelection, beside: TraceData | None) -> RunComparison:
    """Compare two traces, or two requests of one trace."""
    requests = list(selection.trace.requests)
    if beside is None and len(requests) < 2:
        raise InputError(
            "beside", "must be a trace where the other has one request", beside, "give a second one"
        )
    number = selection.request.request
    if beside is not None:
        others = list(beside.requests)
        request = others[min(requests.index(number), len(others) - 1)] if others else None
    else:
        request = next(other for other in requests if other != number)
    second = TraceSelection.of(selection.trace if beside is None else beside, request=request)
    runs = (ComparedRun.of("A", selection), ComparedRun.of("B", second))
    texts = [[join_pieces(token_pieces(run.trace, node.token or 0)) for node in run.nodes] for run in runs]
    shared = 0
    for left, right in zip(*texts, strict=False):
        if left != right:
            break
        shared += 1
    return RunComparison(runs, shared, _setting_rows(runs), _result_rows(runs))


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
    first, other = map(_result_figures, runs)
    lines = [(name, first[name], other[name]) for name in first]
    return [line for line in lines if {line[1], line[2]} != {MISSING}]


def _result_figures(run: ComparedRun) -> dict[str, str]:
    last = run.nodes[-1] if run.nodes else None
    steps = run.trace.steps_of(run.request.request)
    cache = max((step.cache or 0 for step in steps), default=0)
    value, mean = perplexity(run.nodes), mean_entropy(run.nodes)
    return {
        "tokens": str(len(run.nodes)),
        "ended by": MISSING if last is None or last.reason is None else last.reason,
        "perplexity": MISSING if value is None else f"{value:.2f}",
        "mean entropy, nats": MISSING if mean is None else f"{mean:.2f}",
        "score": MISSING if last is None or last.score is None else format_score(last.score),
        "steps": str(len(steps)),
        "time": f"{sum(step.seconds for step in steps):.2f} s",
        "cache, at most": format_bytes(cache) if cache else MISSING,
    }


MAX_POSITIONS: Final = 100  # of drafts, in the chart
MAX_REJECTED_CELLS: Final = 14  # cells of a rejected draft token


@dataclass(frozen=True)
class DraftedForward:
    """One forward pass: its new tokens and the drafts that it verified."""

    step: int
    nodes: Sequence[Node]
    drafts: Sequence[int]
    num_accepted: int

    @property
    def rejected_drafts(self) -> Sequence[int]:
        """The rejected draft token, and those after it, which were not verified."""
        return self.drafts[self.num_accepted :]

    def rejection_pieces(self, trace: TraceData) -> list[TextPiece]:
        """The rejected draft token, and the number of unverified ones after it."""
        first, *rest = self.rejected_drafts
        return clip_pieces(token_pieces(trace, first, True), MAX_REJECTED_CELLS) + (
            [(f" +{len(rest)}", True)] if rest else []
        )


@dataclass(frozen=True)
class DraftPositionStats:
    """Proposed and accepted draft tokens at one draft position."""

    num_drafts: int
    num_accepted: int


def forward_passes(selection: TraceSelection) -> list[DraftedForward]:
    """The forward passes of a sequence, in order."""
    rows: dict[tuple[int, int], RowRecord] = {}
    # Without a drafter, `drafts` holds candidates of the strategy itself.
    for step in selection.trace.steps if selection.request.drafter is not None else ():
        for row in step.rows:
            for run in row.runs:
                rows |= {(step.step, node): row for node in run.nodes[:1]}
    passes = []
    for step_number, group in groupby(selection.path, key=lambda node: node.step):
        nodes = list(group)
        row_record = rows.get((step_number, nodes[0].number))
        passes.append(
            DraftedForward(
                step_number,
                nodes,
                () if row_record is None else row_record.drafts,
                sum(n.is_draft for n in nodes),
            )
        )
    return passes


def tokens_with_notes(trace: TraceData, nodes: Sequence[Node], notes: Mapping[int, int]) -> list[LayoutToken]:
    """The tokens of nodes, with room for notes below; `notes` maps a node to the cells of its note.

    A note may extend below the following tokens, up to the next note.
    """
    placed = node_tokens(trace, nodes)
    needed, noted = 0, None
    for index, node in reversed(list(enumerate(nodes))):
        width = pieces_width(placed[index].pieces)
        if noted is None or placed[index].ends_line:
            needed, noted = 0, index  # the last token before the next note is widened if needed
        needed += width
        if node.number in notes:
            if lacking := max(notes[node.number] - needed, 0):
                last = placed[noted]
                placed[noted] = replace(last, min_width=pieces_width(last.pieces) + lacking)
            noted = None
    return placed


def draft_position_stats(passes: Sequence[DraftedForward]) -> list[DraftPositionStats]:
    """Acceptance by draft position, of at most `MAX_POSITIONS` positions."""
    longest = min(max((len(forward.drafts) for forward in passes), default=0), MAX_POSITIONS)
    ends = [[0] * (longest + 1) for _ in range(2)]  # passes whose drafts, accepted ones, end at a position
    for forward in passes:
        ends[0][min(len(forward.drafts), longest)] += 1
        ends[1][min(forward.num_accepted, longest)] += 1
    drafts, accepted = ([sum(counts[at + 1 :]) for at in range(longest)] for counts in ends)
    return [DraftPositionStats(*pair) for pair in zip(drafts, accepted, strict=True)]


def draft_summary(passes: Sequence[DraftedForward]) -> list[str]:
    """Totals of the drafts, as text."""
    tokens = sum(len(forward.nodes) for forward in passes)
    drafts = sum(len(forward.drafts) for forward in passes)
    accepted = sum(forward.num_accepted for forward in passes)
    parts = [pluralize(len(passes), "forward"), pluralize(tokens, "token")]
    if tokens > MAX_DRAWN_TOKENS:
        parts.append(f"the last {MAX_DRAWN_TOKENS:,} drawn")
    if passes:
        parts.append(f"{tokens / len(passes):.2f} tokens a forward")
    parts.append(
        f"{accepted} of {pluralize(drafts, 'guess', 'guesses')} stood ({100 * accepted / drafts:.1f} %)"
        if drafts
        else "nothing was guessed"
    )
    return parts


MAX_BARS: Final = 8
_NUM_CONTEXT_TOKENS: Final = 10  # tokens shown before a choice


@dataclass(frozen=True)
class ProcessorPanel:
    """One processor, or all of them together: a note, and tokens before and after."""

    name: str
    note: str
    bars: Sequence[TokenShift]


@dataclass(frozen=True)
class ChoiceView:
    """The choice of one token, with its context."""

    trace: TraceData
    node: Node
    token: int
    choice: ChoiceRecord
    context_tokens: Sequence[int]  # the last ones before it

    @cached_property
    def panels(self) -> Sequence[ProcessorPanel]:
        """One panel per processor with an effect, and one for all together."""
        panels = []
        for stage in self.choice.stages:
            note = f"{pluralize(stage.kept, 'token')} left"
            if stage.cut:
                note += f", {stage.cut} cut with {100 * stage.mass:.1f} % of the probability"
            panels.append(ProcessorPanel(stage.name, note, stage.moved))
        bars = [TokenShift(*candidate) for candidate in self.choice.top[:MAX_BARS]]
        if not panels:
            return [ProcessorPanel("the model", "nothing was changed", bars)]
        return [
            *panels,
            ProcessorPanel("all together", "what the model said, and what was chosen from", bars),
        ]

    @cached_property
    def max_probability(self) -> float:
        """The probability of the longest bar."""
        logs = (log for panel in self.panels for bar in panel.bars for log in bar[1:])
        return max([1e-9, *map(probability, logs)])


def last_choice(selection: TraceSelection) -> ChoiceView | None:
    """The last recorded choice of the sequence up to the selected step; None: no choice is recorded."""
    context, view = list(selection.request.prompt), None
    for node in selection.path:
        assert node.token is not None
        if node.choice is not None:
            view = ChoiceView(selection.trace, node, node.token, node.choice, context[-_NUM_CONTEXT_TOKENS:])
        context.append(node.token)
    return view


def format_shift(bar: TokenShift) -> str:
    """The probability of a token before and after, as text."""
    return (
        f"{format_percent(bar.before)} → {format_percent(bar.after)}"
        if bar.after != bar.before
        else format_percent(bar.after)
    )


STATE_LABELS: Final = {
    "best": "best",
    "returned": "returned",
    "alive": "still in the running",
    "ended": "ended, not returned",
    "dropped": "dropped",
}
_MAX_ALTERNATIVES: Final = 5
_MAX_TOKEN_CELLS: Final = 40
_TEENS: Final = range(11, 14)


def group_letter(group: int) -> str:
    """The letter of a beam group: A to Z, then AA."""
    return group_letter(group // 26 - 1) + group_letter(group % 26) if group >= 26 else chr(ord("A") + group)


def ending_label(node: Node) -> str:
    """The finish reason of a sequence, with its rank if it was returned."""
    if node.rank is None:
        return node.reason or ""
    rank = node.rank + 1
    suffix = "th" if rank % 100 in _TEENS else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{suffix}, {node.reason}" if node.reason else f"{rank}{suffix}"


def constraint_progress(trace: TraceData, node: Node) -> str:
    """Constraint progress, such as "2/5", if this token fulfilled a part of it; else ""."""
    request = trace.requests[node.request]
    if node.met is None or request.demands is None or node.parent is None:
        return ""
    above = trace.tree.node(node.parent).met or 0
    return f"{node.met}/{request.demands}" if node.met > above else ""


def token_label(trace: TraceData, token: int) -> str:
    """A token as text of at most `_MAX_TOKEN_CELLS`."""
    return join_pieces(clip_pieces(token_pieces(trace, token, True), _MAX_TOKEN_CELLS))


def alternative_lines(trace: TraceData, node: Node) -> list[str]:
    """The candidates at a node, likeliest first."""
    if node.choice is None:
        return []
    return [
        f"{token_label(trace, candidate.token)}  {format_percent(candidate.processed)}"
        + ("  taken" if candidate.token == node.token else "")
        for candidate in node.choice.top[:_MAX_ALTERNATIVES]
    ]


def tooltip_lines(trace: TraceData, node: Node, state: str) -> list[str]:
    """The tooltip of a node, as lines."""
    if node.token is None:
        return ["prompt"]
    lines = [
        f"{token_label(trace, node.token)}  (token {node.token}, step {node.step}, {STATE_LABELS[state]})"
    ]
    if node.processed is not None:
        unchanged = node.raw == node.processed
        lines.append(
            format_percent(node.processed)
            + ("" if unchanged else f", before the processors {format_percent(node.raw)}")
        )
    if node.score is not None:
        lines.append(f"score {format_score(node.score)}")
    if node.reason is not None:
        lines.append(f"ended: {ending_label(node)}")
    if node.is_draft:
        lines.append("guessed ahead and accepted")
    if node.choice is not None:
        lines.append(f"entropy {format_nats(node.choice.entropy)}")
        lines += alternative_lines(trace, node)
    return lines
