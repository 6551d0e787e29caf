"""The text as SVG: each token shaded by its probability, the entropy of its choice below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

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
    MIN_SCALE_NATS,
    SHADE_LEVELS,
    node_tokens,
    prompt_tokens,
    shade_level,
    text_stats,
)
from descant.trace.token_text import text_pieces
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["LINE_CELLS", "MARGIN", "draw_heading", "draw_shade_legend", "draw_shaded_token", "svg_text"]

MARGIN: Final = 22.0
LINE_CELLS: Final = 84  # cells of a line
TOP: Final = 70.0
LINE_PITCH, TOKEN_HEIGHT, MAX_BAR_HEIGHT = (
    42.0,
    20.0,
    13.0,
)  # from line to line, of a token's shade, and of the tallest bar
_UNDERLINE_STYLES: Final = {
    1: ("shadow dots", 1.2),
    2: ("shadow dash", 1.2),
    3: ("shadow", 1.2),
    4: ("shadow", 2.2),
}


def svg_text(trace: Trace, where: TraceSelection) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert where.request is not None
    asked, nodes = trace.requests[where.request], sequence_path(trace, where)
    before = prompt_tokens(trace, where)
    bits = layout_tokens([*before, *node_tokens(trace, nodes)], LINE_CELLS)
    most = max([MIN_SCALE_NATS, *(one.choice.entropy for one in nodes if one.choice is not None)])
    body = draw_heading(asked.method, text_stats(trace, where, nodes))
    for bit in bits:
        x, y = MARGIN + bit.column * CELL_WIDTH, TOP + bit.row * LINE_PITCH
        if bit.token_index < len(before):
            body.append(text(bit.pieces, x, y + 14.5, "quiet"))
            continue
        node = nodes[bit.token_index - len(before)]
        body.append(draw_shaded_token(trace, node, bit, x, y, _draw_entropy_bars(node, bit, x, y, most)))
    y = TOP + (max((bit.row for bit in bits), default=0) + 1) * LINE_PITCH + 14
    body += draw_shade_legend(MARGIN, y)
    said = f"below each token: the entropy of its choice, the tallest bar {most:.1f} nats"
    if any(one.choice is not None and one.choice.left != one.choice.entropy for one in nodes):
        said += " (grey: the model, blue: left after the processors)"
    body.append(caption(said, MARGIN, y + 20))
    tokens = [node.token for node in nodes if node.token is not None]
    return svg_document(
        body,
        LINE_CELLS * CELL_WIDTH + 2 * MARGIN,
        y + 38,
        f"Text of {asked.method}",
        join_pieces(text_pieces(trace, tokens)),
    )


def draw_heading(title: str, said: Sequence[str]) -> list[str]:
    """The first lines of a picture."""
    return [text(title, MARGIN, 32, "s big ink"), caption(", ".join(said), MARGIN, 50)]


def draw_shaded_token(
    trace: Trace, node: Node, bit: PlacedToken, x: float, y: float, more: Sequence[str] = ()
) -> str:
    """A token on its shade, underlined the more the less likely it was."""
    which = shade_level(node)
    width = bit.width * CELL_WIDTH
    parts = [] if not which else [box(x + 0.5, y, width - 1, TOKEN_HEIGHT, f"shade{which}", rx=3)]
    # On a deep shade what stands for something else is no paler than the rest: it could not be read.
    pieces = [(one, stands and not which) for one, stands in bit.pieces]
    parts.append(text(pieces, x, y + 14.5, "ink" if which is not None else "quiet"))
    if which:
        kind, weight = _UNDERLINE_STYLES[which]
        parts.append(line(x + 2, y + TOKEN_HEIGHT - 1, x + width - 2, y + TOKEN_HEIGHT - 1, kind, weight))
    return titled_group(
        tooltip_lines(trace, node, node.state),
        *parts,
        *more,
        data_node=node.number,
        data_token=node.token,
        data_raw=None if node.raw is None else repr(node.raw),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _draw_entropy_bars(node: Node, bit: PlacedToken, x: float, y: float, most: float) -> list[str]:
    """The entropy of a choice, and what the processors left of it."""
    if node.choice is None:
        return []
    top, width = y + TOKEN_HEIGHT + 2, max(bit.width * CELL_WIDTH - 2, 2)
    high, left = (
        MAX_BAR_HEIGHT * min(max(value, 0.0) / most, 1) for value in (node.choice.entropy, node.choice.left)
    )
    parts = [box(x + 1, top, width, high, "bar", rx=0)] if high >= 0.3 else []
    if node.choice.left != node.choice.entropy and left >= 0.3:
        parts.append(box(x + 1, top, width, left, "accent", rx=0, opacity="0.55"))
    return parts


def draw_shade_legend(x: float, y: float) -> list[str]:
    """What the shades mean."""
    parts = []
    for at, (_, name) in enumerate(SHADE_LEVELS):
        parts.append(box(x, y - 11, 22, 14, f"shade{at} frame", rx=3))
        if at:
            kind, weight = _UNDERLINE_STYLES[at]
            parts.append(line(x + 2, y + 1, x + 20, y + 1, kind, weight))
        parts.append(caption(name, x + 28, y))
        x += 28 + len(name) * 6.2 + 16
    return parts
