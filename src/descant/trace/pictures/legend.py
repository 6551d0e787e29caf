"""What pictures say of nodes, in words: their titles, their ends, and what the whole shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain
from descant.trace.pictures.figures import nats, percent, points
from descant.trace.pictures.terminal_cells import clipped
from descant.trace.token_text import word
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["STATES", "alternatives", "ending", "letter", "named", "progress", "said_of"]

STATES: Final = {
    "best": "best",
    "returned": "returned",
    "alive": "still in the running",
    "ended": "ended, not returned",
    "dropped": "dropped",
}
_SHOWN: Final = 5  # alternatives
_LONGEST: Final = 40  # cells of a token
_TEENS: Final = range(11, 14)


def letter(group: int) -> str:
    """The letter of a group: A to Z, then AA."""
    return letter(group // 26 - 1) + letter(group % 26) if group >= 26 else chr(ord("A") + group)


def ending(node: Node) -> str:
    """How a sequence ended, and its place among those that were returned."""
    if node.rank is None:
        return node.reason or ""
    place = node.rank + 1
    tail = "th" if place % 100 in _TEENS else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{tail}, {node.reason}" if node.reason else f"{place}{tail}"


def progress(trace: Trace, node: Node) -> str:
    """How far its constraints are met, where that token met some of them; "" elsewhere."""
    asked = trace.requests[node.request]
    if node.met is None or asked.demands is None or node.parent is None:
        return ""
    above = trace.tree.node(node.parent).met or 0
    return f"{node.met}/{asked.demands}" if node.met > above else ""


def named(trace: Trace, token: int) -> str:
    """A token in a line about it."""
    return plain(clipped(word(trace, token, True), _LONGEST))


def alternatives(trace: Trace, node: Node) -> list[str]:
    """What else could have been taken there, likeliest first."""
    if node.look is None:
        return []
    return [
        f"{named(trace, one.token)}  {percent(one.processed)}"
        + ("  taken" if one.token == node.token else "")
        for one in node.look.top[:_SHOWN]
    ]


def said_of(trace: Trace, node: Node, state: str) -> list[str]:
    """All that is known of a node, a line each."""
    if node.token is None:
        return ["prompt"]
    lines = [f"{named(trace, node.token)}  (token {node.token}, step {node.born}, {STATES[state]})"]
    if node.processed is not None:
        same = node.raw == node.processed
        lines.append(
            percent(node.processed) + ("" if same else f", before the processors {percent(node.raw)}")
        )
    if node.score is not None:
        lines.append(f"score {points(node.score)}")
    if node.reason is not None:
        lines.append(f"ended: {ending(node)}")
    if node.guessed:
        lines.append("guessed ahead and accepted")
    if node.look is not None:
        lines.append(f"entropy {nats(node.look.entropy)}")
        lines += alternatives(trace, node)
    return lines
