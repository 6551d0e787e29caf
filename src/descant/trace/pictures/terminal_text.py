"""A sequence for a terminal: each token shaded or marked by its probability, with its entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width
from descant.trace.pictures.text_layout import PlacedToken, layout_tokens
from descant.trace.pictures.text_stats import (
    MAX_DRAWN_TOKENS,
    MIN_SCALE_NATS,
    SHADE_LEVELS,
    node_tokens,
    prompt_tokens,
    shade_level,
    text_stats,
)
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["SHADE_MARKS", "group_by_line", "repeat_marks", "shade_style", "terminal_text"]

GUTTER: Final = 2
SHADE_MARKS: Final = " ░▒▓█"  # shades without colours
_ENTROPY_BARS: Final = "▁▂▃▄▅▆▇█"


def terminal_text(trace: TraceData, selection: TraceSelection, canvas: TerminalCanvas) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert selection.request is not None
    request, nodes = trace.requests[selection.request], sequence_path(trace, selection)
    prompt = prompt_tokens(trace, selection, nodes)
    stats = text_stats(trace, selection, nodes)
    nodes = nodes[-MAX_DRAWN_TOKENS:]
    placed = layout_tokens([*prompt, *node_tokens(trace, nodes)], max(canvas.width - GUTTER, 1))
    max_entropy = max([MIN_SCALE_NATS, *(one.choice.entropy for one in nodes if one.choice is not None)])

    def node_of(token: PlacedToken) -> Node | None:
        return None if token.token_index < len(prompt) else nodes[token.token_index - len(prompt)]

    rows: list[list[StyledText]] = [
        *canvas.wrap_text(request.method, "bold"),
        *canvas.wrap_text(", ".join(stats)),
        [],
    ]
    for line in group_by_line(placed):
        rows.append([("  ", ""), *_token_spans(line, node_of)])
        if not canvas.colour and any(node_of(token) is not None for token in line):
            rows.append([("p ", ""), *repeat_marks(line, lambda token: _shade_mark(node_of(token)))])
        if any(node_of(token) is not None for token in line):
            rows.append(
                [
                    ("H ", "dim"),
                    *repeat_marks(line, lambda token: _entropy_bar(node_of(token), max_entropy), "dim"),
                ]
            )
    rows += [
        [],
        *_legend_lines(canvas),
        *canvas.wrap_text(f"H: entropy of the choice, {_ENTROPY_BARS[-1]} is {max_entropy:.1f} nats"),
    ]
    return canvas.format_lines(rows)


def group_by_line(placed: Sequence[PlacedToken]) -> list[list[PlacedToken]]:
    """The tokens of each line."""
    rows: list[list[PlacedToken]] = []
    for token in placed:
        while len(rows) <= token.row:
            rows.append([])
        rows[token.row].append(token)
    return rows


def repeat_marks(
    line: Sequence[PlacedToken], mark: Callable[[PlacedToken], str], style: str = ""
) -> list[StyledText]:
    """A mark below each token, repeated over its width."""
    return [(mark(token) * token.width, style) for token in line]


def shade_style(node: Node) -> str:
    """The style of a token."""
    level = shade_level(node)
    return "dim" if level is None else f"shade{level}" if level else ""


def _token_spans(
    line: Sequence[PlacedToken], node_of: Callable[[PlacedToken], Node | None]
) -> list[StyledText]:
    spans: list[StyledText] = []
    for token in line:
        node = node_of(token)
        style = "dim" if node is None else shade_style(node)
        spans.append((join_pieces(token.pieces), style))
    return spans


def _shade_mark(node: Node | None) -> str:
    level = None if node is None else shade_level(node)
    return " " if level is None else SHADE_MARKS[level]


def _entropy_bar(node: Node | None, max_entropy: float) -> str:
    if node is None or node.choice is None:
        return " "
    return _ENTROPY_BARS[
        min(int(max(node.choice.entropy, 0.0) / max_entropy * len(_ENTROPY_BARS)), len(_ENTROPY_BARS) - 1)
    ]


def _legend_lines(canvas: TerminalCanvas) -> list[list[StyledText]]:
    """The legend of the shades."""
    rows: list[list[StyledText]] = [[] if canvas.colour else [("p:", "dim")]]
    for level, (_, name) in enumerate(SHADE_LEVELS):
        label = f" {name} " if canvas.colour else f" {SHADE_MARKS[level] if level else 'blank'} {name}  "
        if rows[-1] and sum(cell_width(one) for one, _ in rows[-1]) + cell_width(label) > canvas.width:
            rows.append([])
        rows[-1].append((label, f"shade{level}" if level else "dim"))
    return rows
