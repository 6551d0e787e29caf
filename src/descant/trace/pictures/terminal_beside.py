"""Two runs side by side for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain, shown
from descant.trace.pictures.comparison import Contrast, Side, contrast
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_canvas import Paper, Span
from descant.trace.pictures.terminal_cells import cells, clipped, fitted
from descant.trace.pictures.terminal_text import by_row, shaded
from descant.trace.pictures.text_layout import flow
from descant.trace.pictures.text_stats import words

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_beside"]

BETWEEN: Final = " │ "


def terminal_beside(trace: Trace, where: Where, beside: Trace | None, paper: Paper) -> str:
    """Two texts, what was set otherwise, and what came of it."""
    both = contrast(trace, where, beside)
    half = max((paper.width - cells(BETWEEN)) // 2, 1)
    rows: list[list[Span]] = [
        *paper.told("Two runs side by side", "bold"),
        *paper.told(both.parting()),
        [],
    ]
    left, right = (_column(side, both, half) for side in both.sides)
    for at in range(max(len(left), len(right))):
        one = left[at] if at < len(left) else []
        used = sum(cells(said) for said, _ in one)
        rows.append(
            [*one, (" " * (half - used), ""), (BETWEEN, "dim"), *(right[at] if at < len(right) else [])]
        )
    wide = max((paper.width - 22) // 2, 1)
    for title, lines in (("set otherwise", both.settings), ("what came of it", both.results)):
        if lines:
            rows += [[], [(fitted(title, 22), "bold"), (fitted("A", wide), "accent"), ("B", "accent")]]
            rows += [
                [
                    (fitted(_safe(name), 20) + "  ", "dim"),
                    (fitted(_safe(a), wide - 1) + " ", ""),
                    (_safe(b), ""),
                ]
                for name, a, b in lines
            ]
    return paper.lines(rows)


def _safe(said: str) -> str:
    return plain(shown(said))


def _column(side: Side, both: Contrast, width: int) -> list[list[Span]]:
    """One of the texts, those tokens dim that both begin with."""
    title = plain(clipped(shown(f"{side.name}  {side.asked.method}"), width))
    rows: list[list[Span]] = [[(title, "bold")], []]
    bits = flow(words(side.trace, side.nodes), width)
    return rows + [
        [(plain(bit.pieces), "dim" if bit.at < both.shared else shaded(side.nodes[bit.at])) for bit in line]
        for line in by_row(bits)
    ]
