"""What pictures say of nodes, in words: their titles, their ends, and what the whole shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_nats, format_percent, format_score
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.token_text import token_pieces
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

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
_MAX_ALTERNATIVES: Final = 5  # alternatives
_MAX_TOKEN_CELLS: Final = 40  # cells of a token
_TEENS: Final = range(11, 14)


def group_letter(group: int) -> str:
    """The letter of a group: A to Z, then AA."""
    return group_letter(group // 26 - 1) + group_letter(group % 26) if group >= 26 else chr(ord("A") + group)


def ending_label(node: Node) -> str:
    """How a sequence ended, and its place among those that were returned."""
    if node.rank is None:
        return node.reason or ""
    place = node.rank + 1
    tail = "th" if place % 100 in _TEENS else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{tail}, {node.reason}" if node.reason else f"{place}{tail}"


def constraint_progress(trace: Trace, node: Node) -> str:
    """How far its constraints are met, where that token met some of them; "" elsewhere."""
    asked = trace.requests[node.request]
    if node.met is None or asked.demands is None or node.parent is None:
        return ""
    above = trace.tree.node(node.parent).met or 0
    return f"{node.met}/{asked.demands}" if node.met > above else ""


def token_label(trace: Trace, token: int) -> str:
    """A token in a line about it."""
    return join_pieces(clip_pieces(token_pieces(trace, token, True), _MAX_TOKEN_CELLS))


def alternative_lines(trace: Trace, node: Node) -> list[str]:
    """What else could have been taken there, likeliest first."""
    if node.choice is None:
        return []
    return [
        f"{token_label(trace, one.token)}  {format_percent(one.processed)}"
        + ("  taken" if one.token == node.token else "")
        for one in node.choice.top[:_MAX_ALTERNATIVES]
    ]


def tooltip_lines(trace: Trace, node: Node, state: str) -> list[str]:
    """All that is known of a node, a line each."""
    if node.token is None:
        return ["prompt"]
    lines = [
        f"{token_label(trace, node.token)}  (token {node.token}, step {node.step}, {STATE_LABELS[state]})"
    ]
    if node.processed is not None:
        same = node.raw == node.processed
        lines.append(
            format_percent(node.processed)
            + ("" if same else f", before the processors {format_percent(node.raw)}")
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
