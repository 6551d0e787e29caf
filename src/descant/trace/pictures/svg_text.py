"""A sequence as SVG: each token shaded by its probability, the entropy of its choice below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.node_labels import tooltip_lines
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg_elements import (
    CELL_WIDTH,
    box,
    caption,
    line,
    svg_document,
    text,
    titled_group,
)
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
from descant.trace.token_text import text_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["LINE_CELLS", "MARGIN", "draw_heading", "draw_shade_legend", "draw_shaded_token", "svg_text"]

MARGIN: Final = 22.0
LINE_CELLS: Final = 84  # width of a line
TOP: Final = 70.0
LINE_PITCH, TOKEN_HEIGHT, MAX_BAR_HEIGHT = (
    42.0,
    20.0,
    13.0,
)
_UNDERLINE_STYLES: Final = {
    1: ("shadow dots", 1.2),
    2: ("shadow dash", 1.2),
    3: ("shadow", 1.2),
    4: ("shadow", 2.2),
}


def svg_text(trace: TraceData, selection: TraceSelection) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert selection.request is not None
    request, nodes = trace.requests[selection.request], sequence_path(trace, selection)
    prompt = prompt_tokens(trace, selection, nodes)
    stats = text_stats(trace, selection, nodes)
    nodes = nodes[-MAX_DRAWN_TOKENS:]
    placed = layout_tokens([*prompt, *node_tokens(trace, nodes)], LINE_CELLS)
    max_entropy = max([MIN_SCALE_NATS, *(one.choice.entropy for one in nodes if one.choice is not None)])
    body = draw_heading(request.method, stats)
    for token in placed:
        x, y = MARGIN + token.column * CELL_WIDTH, TOP + token.row * LINE_PITCH
        if token.token_index < len(prompt):
            body.append(text(token.pieces, x, y + 14.5, "quiet"))
            continue
        node = nodes[token.token_index - len(prompt)]
        body.append(
            draw_shaded_token(trace, node, token, x, y, _draw_entropy_bars(node, token, x, y, max_entropy))
        )
    y = TOP + (max((token.row for token in placed), default=0) + 1) * LINE_PITCH + 14
    body += draw_shade_legend(MARGIN, y)
    note = f"below each token: the entropy of its choice, the tallest bar {max_entropy:.1f} nats"
    if any(one.choice is not None and one.choice.left != one.choice.entropy for one in nodes):
        note += " (grey: the model, blue: left after the processors)"
    body.append(caption(note, MARGIN, y + 20))
    tokens = [node.token for node in nodes if node.token is not None]
    return svg_document(
        body,
        LINE_CELLS * CELL_WIDTH + 2 * MARGIN,
        y + 38,
        f"Text of {request.method}",
        join_pieces(text_pieces(trace, tokens)),
    )


def draw_heading(title: str, details: Sequence[str]) -> list[str]:
    """Title and details."""
    return [text(title, MARGIN, 32, "s big ink"), caption(", ".join(details), MARGIN, 50)]


def draw_shaded_token(
    trace: TraceData, node: Node, token: PlacedToken, x: float, y: float, children: Sequence[str] = ()
) -> str:
    """A token on its shade; the less likely it was, the stronger its underline."""
    level = shade_level(node)
    width = token.width * CELL_WIDTH
    parts = [] if not level else [box(x + 0.5, y, width - 1, TOKEN_HEIGHT, f"shade{level}", rx=3)]
    # Escaped pieces are not paler on a dark shade: they would be unreadable.
    pieces = [(one, is_escaped and not level) for one, is_escaped in token.pieces]
    parts.append(text(pieces, x, y + 14.5, "ink" if level is not None else "quiet"))
    if level:
        kind, weight = _UNDERLINE_STYLES[level]
        parts.append(line(x + 2, y + TOKEN_HEIGHT - 1, x + width - 2, y + TOKEN_HEIGHT - 1, kind, weight))
    return titled_group(
        tooltip_lines(trace, node, node.state),
        *parts,
        *children,
        data_node=node.number,
        data_token=node.token,
        data_raw=None if node.raw is None else repr(node.raw),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _draw_entropy_bars(node: Node, token: PlacedToken, x: float, y: float, max_entropy: float) -> list[str]:
    """Bars of the entropy before and after the processors."""
    if node.choice is None:
        return []
    top, width = y + TOKEN_HEIGHT + 2, max(token.width * CELL_WIDTH - 2, 2)
    height, height_left = (
        MAX_BAR_HEIGHT * min(max(value, 0.0) / max_entropy, 1)
        for value in (node.choice.entropy, node.choice.left)
    )
    parts = [box(x + 1, top, width, height, "bar", rx=0)] if height >= 0.3 else []
    if node.choice.left != node.choice.entropy and height_left >= 0.3:
        parts.append(box(x + 1, top, width, height_left, "accent", rx=0, opacity="0.55"))
    return parts


def draw_shade_legend(x: float, y: float) -> list[str]:
    """The legend of the shades."""
    parts = []
    for level, (_, name) in enumerate(SHADE_LEVELS):
        parts.append(box(x, y - 11, 22, 14, f"shade{level} frame", rx=3))
        if level:
            kind, weight = _UNDERLINE_STYLES[level]
            parts.append(line(x + 2, y + 1, x + 20, y + 1, kind, weight))
        parts.append(caption(name, x + 28, y))
        x += 28 + len(name) * 6.2 + 16
    return parts
