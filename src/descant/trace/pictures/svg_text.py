"""The text as SVG: each token shaded by its probability, the entropy of its choice below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain
from descant.trace.pictures.drawing import CELL, box, caption, document, line, text, titled
from descant.trace.pictures.legend import said_of
from descant.trace.pictures.paths import path_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.text_layout import Bit, flow
from descant.trace.pictures.text_stats import LEAST, SHADES, figures, prompt, shade, words
from descant.trace.token_text import phrase
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["COLUMNS", "MARGIN", "heading", "shaded", "shades", "svg_text"]

MARGIN: Final = 22.0
COLUMNS: Final = 84  # cells of a line
TOP: Final = 70.0
PITCH, TALL, BARS = 42.0, 20.0, 13.0  # from line to line, of a token's shade, and of the tallest bar
_UNDER: Final = {1: ("shadow dots", 1.2), 2: ("shadow dash", 1.2), 3: ("shadow", 1.2), 4: ("shadow", 2.2)}


def svg_text(trace: Trace, where: Where) -> str:
    """The text of one sequence, after the end of its prompt."""
    assert where.request is not None
    asked, nodes = trace.requests[where.request], path_of(trace, where)
    before = prompt(trace, where)
    bits = flow([*before, *words(trace, nodes)], COLUMNS)
    most = max([LEAST, *(one.look.entropy for one in nodes if one.look is not None)])
    body = heading(asked.method, figures(trace, where, nodes))
    for bit in bits:
        x, y = MARGIN + bit.column * CELL, TOP + bit.row * PITCH
        if bit.at < len(before):
            body.append(text(bit.pieces, x, y + 14.5, "quiet"))
            continue
        node = nodes[bit.at - len(before)]
        body.append(shaded(trace, node, bit, x, y, _bars(node, bit, x, y, most)))
    y = TOP + (max((bit.row for bit in bits), default=0) + 1) * PITCH + 14
    body += shades(MARGIN, y)
    said = f"below each token: the entropy of its choice, the tallest bar {most:.1f} nats"
    if any(one.look is not None and one.look.left != one.look.entropy for one in nodes):
        said += " (grey: the model, blue: left after the processors)"
    body.append(caption(said, MARGIN, y + 20))
    tokens = [node.token for node in nodes if node.token is not None]
    return document(
        body, COLUMNS * CELL + 2 * MARGIN, y + 38, f"Text of {asked.method}", plain(phrase(trace, tokens))
    )


def heading(title: str, said: Sequence[str]) -> list[str]:
    """The first lines of a picture."""
    return [text(title, MARGIN, 32, "s big ink"), caption(", ".join(said), MARGIN, 50)]


def shaded(trace: Trace, node: Node, bit: Bit, x: float, y: float, more: Sequence[str] = ()) -> str:
    """A token on its shade, underlined the more the less likely it was."""
    which = shade(node)
    width = bit.width * CELL
    parts = [] if not which else [box(x + 0.5, y, width - 1, TALL, f"shade{which}", rx=3)]
    # On a deep shade what stands for something else is no paler than the rest: it could not be read.
    pieces = [(one, stands and not which) for one, stands in bit.pieces]
    parts.append(text(pieces, x, y + 14.5, "ink" if which is not None else "quiet"))
    if which:
        kind, weight = _UNDER[which]
        parts.append(line(x + 2, y + TALL - 1, x + width - 2, y + TALL - 1, kind, weight))
    return titled(
        said_of(trace, node, node.state),
        *parts,
        *more,
        data_node=node.number,
        data_token=node.token,
        data_raw=None if node.raw is None else repr(node.raw),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _bars(node: Node, bit: Bit, x: float, y: float, most: float) -> list[str]:
    """The entropy of a choice, and what the processors left of it."""
    if node.look is None:
        return []
    top, width = y + TALL + 2, max(bit.width * CELL - 2, 2)
    high, left = (BARS * min(max(value, 0.0) / most, 1) for value in (node.look.entropy, node.look.left))
    parts = [box(x + 1, top, width, high, "bar", rx=0)] if high >= 0.3 else []
    if node.look.left != node.look.entropy and left >= 0.3:
        parts.append(box(x + 1, top, width, left, "accent", rx=0, opacity="0.55"))
    return parts


def shades(x: float, y: float) -> list[str]:
    """What the shades mean."""
    parts = []
    for at, (_, name) in enumerate(SHADES):
        parts.append(box(x, y - 11, 22, 14, f"shade{at} frame", rx=3))
        if at:
            kind, weight = _UNDER[at]
            parts.append(line(x + 2, y + 1, x + 20, y + 1, kind, weight))
        parts.append(caption(name, x + 28, y))
        x += 28 + len(name) * 6.2 + 16
    return parts
