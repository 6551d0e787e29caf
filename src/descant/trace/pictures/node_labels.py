"""Labels of tree nodes: tooltips, endings, states."""

from __future__ import annotations

from typing import Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_nats, format_percent, format_score
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.token_text import token_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = [
    "STATE_LABELS",
    "alternative_lines",
    "constraint_progress",
    "ending_label",
    "group_letter",
    "token_label",
    "tooltip_lines",
]

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
        f"{token_label(trace, one.token)}  {format_percent(one.processed)}"
        + ("  taken" if one.token == node.token else "")
        for one in node.choice.top[:_MAX_ALTERNATIVES]
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
