"""The text for a terminal: each token shaded by its probability, or marked below, and its entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain
from descant.trace.pictures.paths import path_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_canvas import Paper, Span
from descant.trace.pictures.terminal_cells import cells
from descant.trace.pictures.text_layout import Bit, flow
from descant.trace.pictures.text_stats import LEAST, SHADES, figures, prompt, shade, words
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["MARKS", "by_row", "shaded", "spread", "terminal_text"]

GUTTER: Final = 2
MARKS: Final = " ░▒▓█"  # of the shades, where there is no colour
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


def terminal_text(trace: Trace, where: Where, paper: Paper) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert where.request is not None
    asked, nodes = trace.requests[where.request], path_of(trace, where)
    before = prompt(trace, where)
    bits = flow([*before, *words(trace, nodes)], max(paper.width - GUTTER, 1))
    most = max([LEAST, *(one.look.entropy for one in nodes if one.look is not None)])

    def node_of(bit: Bit) -> Node | None:
        return None if bit.at < len(before) else nodes[bit.at - len(before)]

    rows: list[list[Span]] = [
        *paper.told(asked.method, "bold"),
        *paper.told(", ".join(figures(trace, where, nodes))),
        [],
    ]
    for line in by_row(bits):
        rows.append([("  ", ""), *_letters(line, node_of)])
        if not paper.colour and any(node_of(bit) is not None for bit in line):
            rows.append([("p ", ""), *spread(line, lambda bit: _mark(node_of(bit)))])
        if any(node_of(bit) is not None for bit in line):
            rows.append([("H ", "dim"), *spread(line, lambda bit: _height(node_of(bit), most), "dim")])
    rows += [[], *_legend(paper), *paper.told(f"H: entropy of the choice, {_HEIGHTS[-1]} is {most:.1f} nats")]
    return paper.lines(rows)


def by_row(bits: Sequence[Bit]) -> list[list[Bit]]:
    """The tokens of each line."""
    rows: list[list[Bit]] = []
    for bit in bits:
        while len(rows) <= bit.row:
            rows.append([])
        rows[bit.row].append(bit)
    return rows


def spread(line: Sequence[Bit], mark: Callable[[Bit], str], style: str = "") -> list[Span]:
    """A mark below each token, as wide as it is."""
    return [(mark(bit) * bit.width, style) for bit in line]


def shaded(node: Node) -> str:
    """The style of a token."""
    which = shade(node)
    return "dim" if which is None else f"shade{which}" if which else ""


def _letters(line: Sequence[Bit], node_of: Callable[[Bit], Node | None]) -> list[Span]:
    spans: list[Span] = []
    for bit in line:
        node = node_of(bit)
        style = "dim" if node is None else shaded(node)
        spans.append((plain(bit.pieces), style))
    return spans


def _mark(node: Node | None) -> str:
    which = None if node is None else shade(node)
    return " " if which is None else MARKS[which]


def _height(node: Node | None, most: float) -> str:
    if node is None or node.look is None:
        return " "
    return _HEIGHTS[min(int(max(node.look.entropy, 0.0) / most * len(_HEIGHTS)), len(_HEIGHTS) - 1)]


def _legend(paper: Paper) -> list[list[Span]]:
    """What the shades mean."""
    rows: list[list[Span]] = [[] if paper.colour else [("p:", "dim")]]
    for at, (_, name) in enumerate(SHADES):
        said = f" {name} " if paper.colour else f" {MARKS[at] if at else 'blank'} {name}  "
        if rows[-1] and sum(cells(one) for one, _ in rows[-1]) + cells(said) > paper.width:
            rows.append([])
        rows[-1].append((said, f"shade{at}" if at else "dim"))
    return rows
