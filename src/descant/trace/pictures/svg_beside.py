"""Two runs side by side as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain, shown
from descant.trace.pictures.comparison import Contrast, Line, Side, contrast
from descant.trace.pictures.drawing import CELL, box, caption, document, line, text
from descant.trace.pictures.selection import Where
from descant.trace.pictures.svg_text import COLUMNS, MARGIN, heading, shaded, shades
from descant.trace.pictures.terminal_cells import clipped
from descant.trace.pictures.text_layout import flow
from descant.trace.pictures.text_stats import words
from descant.trace.token_text import phrase

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_beside"]

WIDTH: Final = COLUMNS * CELL + 2 * MARGIN
HALF: Final = 40  # cells of a column
GAP: Final = 4  # cells between the two
TOP, PITCH = 104.0, 25.0


def svg_beside(trace: Trace, where: Where, beside: Trace | None) -> str:
    """Two texts, what was set otherwise, and what came of it."""
    both = contrast(trace, where, beside)
    body = heading("Two runs side by side", [both.parting()])
    ends = [
        _column(side, both, MARGIN + at * (HALF + GAP) * CELL, body) for at, side in enumerate(both.sides)
    ]
    middle = MARGIN + (HALF + GAP / 2) * CELL
    body.append(line(middle, TOP - 28, middle, max(ends) + 4, "frame"))
    y = max(ends) + 30
    body += [*shades(MARGIN, y), *_shared(both, y + 22)]
    y += 58
    for title, lines in (("set otherwise", both.settings), ("what came of it", both.results)):
        if lines:
            y = _table(title, lines, y, body)
    texts = (f"{side.name}: {plain(_text(side))}" for side in both.sides)
    return document(body, WIDTH, y, "Two runs side by side", f"{both.parting()}. {' '.join(texts)}")


def _text(side: Side) -> list[tuple[str, bool]]:
    return phrase(side.trace, [node.token for node in side.nodes if node.token is not None])


def _column(side: Side, both: Contrast, x: float, body: list[str]) -> float:
    """One of the texts, those tokens quiet that both begin with; where it ends."""
    body += [
        box(x, TOP - 26, 18, 18, "wash", rx=4),
        text(side.name, x + 9, TOP - 12.5, "s bold accent note", "middle"),
        text(clipped(shown(side.asked.method), HALF - 4), x + 26, TOP - 12.5, "s bold ink"),
    ]
    bits = flow(words(side.trace, side.nodes), HALF)
    marked = False
    for bit in bits:
        left, y = x + bit.column * CELL, TOP + bit.row * PITCH
        if bit.at < both.shared:
            body.append(text(bit.pieces, left, y + 14.5, "quiet"))
            continue
        if not marked and both.shared:
            body.append(line(left, y - 2, left, y + 22, "strong", 2))
        marked = True
        body.append(shaded(side.trace, side.nodes[bit.at], bit, left, y))
    return TOP + (max((bit.row for bit in bits), default=0) + 1) * PITCH


def _shared(both: Contrast, y: float) -> list[str]:
    if not both.shared:
        return []
    return [
        line(MARGIN + 2, y - 11, MARGIN + 2, y + 3, "strong", 2),
        caption("from here on they differ; before it, quiet, they are the same", MARGIN + 28, y),
    ]


def _table(title: str, lines: Sequence[Line], y: float, body: list[str]) -> float:
    """Names, and what each is on either side; where it ends."""
    first, second = MARGIN + 26 * CELL, MARGIN + 54 * CELL
    body += [
        text(title, MARGIN, y, "s bold ink"),
        text("A", first, y, "s bold accent"),
        text("B", second, y, "s bold accent"),
        line(MARGIN, y + 7, WIDTH - MARGIN, y + 7, "frame"),
    ]
    y += 24
    for name, one, other in lines:
        body += [
            text(clipped(shown(name), 25), MARGIN, y, "note quiet"),
            text(clipped(shown(one), 30), first, y, "note ink"),
            text(clipped(shown(other), 32), second, y, "note ink"),
        ]
        y += 18
    return y + 18
