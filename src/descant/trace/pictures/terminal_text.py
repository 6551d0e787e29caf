"""The text for a terminal: each token shaded by its probability, or marked below, and its entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width
from descant.trace.pictures.text_layout import PlacedToken, layout_tokens
from descant.trace.pictures.text_stats import (
    MIN_SCALE_NATS,
    SHADE_LEVELS,
    node_tokens,
    prompt_tokens,
    shade_level,
    text_stats,
)
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["SHADE_MARKS", "group_by_line", "repeat_marks", "shade_style", "terminal_text"]

GUTTER: Final = 2
SHADE_MARKS: Final = " ░▒▓█"  # of the shades, where there is no colour
_ENTROPY_BARS: Final = "▁▂▃▄▅▆▇█"


def terminal_text(trace: Trace, where: TraceSelection, paper: TerminalCanvas) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert where.request is not None
    asked, nodes = trace.requests[where.request], sequence_path(trace, where)
    before = prompt_tokens(trace, where)
    bits = layout_tokens([*before, *node_tokens(trace, nodes)], max(paper.width - GUTTER, 1))
    most = max([MIN_SCALE_NATS, *(one.choice.entropy for one in nodes if one.choice is not None)])

    def node_of(bit: PlacedToken) -> Node | None:
        return None if bit.token_index < len(before) else nodes[bit.token_index - len(before)]

    rows: list[list[StyledText]] = [
        *paper.wrap_text(asked.method, "bold"),
        *paper.wrap_text(", ".join(text_stats(trace, where, nodes))),
        [],
    ]
    for line in group_by_line(bits):
        rows.append([("  ", ""), *_token_spans(line, node_of)])
        if not paper.colour and any(node_of(bit) is not None for bit in line):
            rows.append([("p ", ""), *repeat_marks(line, lambda bit: _shade_mark(node_of(bit)))])
        if any(node_of(bit) is not None for bit in line):
            rows.append(
                [("H ", "dim"), *repeat_marks(line, lambda bit: _entropy_bar(node_of(bit), most), "dim")]
            )
    rows += [
        [],
        *_legend_lines(paper),
        *paper.wrap_text(f"H: entropy of the choice, {_ENTROPY_BARS[-1]} is {most:.1f} nats"),
    ]
    return paper.format_lines(rows)


def group_by_line(bits: Sequence[PlacedToken]) -> list[list[PlacedToken]]:
    """The tokens of each line."""
    rows: list[list[PlacedToken]] = []
    for bit in bits:
        while len(rows) <= bit.row:
            rows.append([])
        rows[bit.row].append(bit)
    return rows


def repeat_marks(
    line: Sequence[PlacedToken], mark: Callable[[PlacedToken], str], style: str = ""
) -> list[StyledText]:
    """A mark below each token, as wide as it is."""
    return [(mark(bit) * bit.width, style) for bit in line]


def shade_style(node: Node) -> str:
    """The style of a token."""
    which = shade_level(node)
    return "dim" if which is None else f"shade{which}" if which else ""


def _token_spans(
    line: Sequence[PlacedToken], node_of: Callable[[PlacedToken], Node | None]
) -> list[StyledText]:
    spans: list[StyledText] = []
    for bit in line:
        node = node_of(bit)
        style = "dim" if node is None else shade_style(node)
        spans.append((join_pieces(bit.pieces), style))
    return spans


def _shade_mark(node: Node | None) -> str:
    which = None if node is None else shade_level(node)
    return " " if which is None else SHADE_MARKS[which]


def _entropy_bar(node: Node | None, most: float) -> str:
    if node is None or node.choice is None:
        return " "
    return _ENTROPY_BARS[
        min(int(max(node.choice.entropy, 0.0) / most * len(_ENTROPY_BARS)), len(_ENTROPY_BARS) - 1)
    ]


def _legend_lines(paper: TerminalCanvas) -> list[list[StyledText]]:
    """What the shades mean."""
    rows: list[list[StyledText]] = [[] if paper.colour else [("p:", "dim")]]
    for at, (_, name) in enumerate(SHADE_LEVELS):
        said = f" {name} " if paper.colour else f" {SHADE_MARKS[at] if at else 'blank'} {name}  "
        if rows[-1] and sum(cell_width(one) for one, _ in rows[-1]) + cell_width(said) > paper.width:
            rows.append([])
        rows[-1].append((said, f"shade{at}" if at else "dim"))
    return rows
