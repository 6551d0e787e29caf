"""Two runs side by side for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.comparison import ComparedRun, RunComparison, compare_runs
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, fit_text
from descant.trace.pictures.terminal_text import group_by_line, shade_style
from descant.trace.pictures.text_layout import layout_tokens
from descant.trace.pictures.text_stats import node_tokens

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_beside"]

COLUMN_SEPARATOR: Final = " │ "


def terminal_beside(trace: Trace, where: TraceSelection, beside: Trace | None, paper: TerminalCanvas) -> str:
    """Two texts, what was set otherwise, and what came of it."""
    both = compare_runs(trace, where, beside)
    half = max((paper.width - cell_width(COLUMN_SEPARATOR)) // 2, 1)
    rows: list[list[StyledText]] = [
        *paper.wrap_text("Two runs side by side", "bold"),
        *paper.wrap_text(both.divergence_text()),
        [],
    ]
    left, right = (_run_lines(side, both, half) for side in both.runs)
    for at in range(max(len(left), len(right))):
        one = left[at] if at < len(left) else []
        used = sum(cell_width(said) for said, _ in one)
        rows.append(
            [
                *one,
                (" " * (half - used), ""),
                (COLUMN_SEPARATOR, "dim"),
                *(right[at] if at < len(right) else []),
            ]
        )
    wide = max((paper.width - 22) // 2, 1)
    for title, lines in (("set otherwise", both.settings), ("what came of it", both.results)):
        if lines:
            rows += [[], [(fit_text(title, 22), "bold"), (fit_text("A", wide), "accent"), ("B", "accent")]]
            rows += [
                [
                    (fit_text(_escape(name), 20) + "  ", "dim"),
                    (fit_text(_escape(a), wide - 1) + " ", ""),
                    (_escape(b), ""),
                ]
                for name, a, b in lines
            ]
    return paper.format_lines(rows)


def _escape(said: str) -> str:
    return join_pieces(escape_invisible(said))


def _run_lines(side: ComparedRun, both: RunComparison, width: int) -> list[list[StyledText]]:
    """One of the texts, those tokens dim that both begin with."""
    title = join_pieces(clip_pieces(escape_invisible(f"{side.name}  {side.request.method}"), width))
    rows: list[list[StyledText]] = [[(title, "bold")], []]
    bits = layout_tokens(node_tokens(side.trace, side.nodes), width)
    return rows + [
        [
            (
                join_pieces(bit.pieces),
                "dim"
                if bit.token_index < both.num_shared_tokens
                else shade_style(side.nodes[bit.token_index]),
            )
            for bit in line
        ]
        for line in group_by_line(bits)
    ]
