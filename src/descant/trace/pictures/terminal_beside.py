"""Two runs side by side for a terminal."""

from __future__ import annotations

from typing import Final

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.comparison import ComparedRun, RunComparison, compare_runs
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, fit_text
from descant.trace.pictures.terminal_text import group_by_line, shade_style
from descant.trace.pictures.text_layout import layout_tokens
from descant.trace.pictures.text_stats import MAX_DRAWN_TOKENS, node_tokens
from descant.trace.trace_data import TraceData

__all__ = ["terminal_beside"]

COLUMN_SEPARATOR: Final = " │ "


def terminal_beside(
    trace: TraceData, selection: TraceSelection, beside: TraceData | None, canvas: TerminalCanvas
) -> str:
    """Two texts, their different settings and their results."""
    comparison = compare_runs(trace, selection, beside)
    column_width = max((canvas.width - cell_width(COLUMN_SEPARATOR)) // 2, 1)
    rows: list[list[StyledText]] = [
        *canvas.wrap_text("Two runs side by side", "bold"),
        *canvas.wrap_text(comparison.divergence_text()),
        [],
    ]
    left, right = (_run_lines(run, comparison, column_width) for run in comparison.runs)
    for index in range(max(len(left), len(right))):
        left_line = left[index] if index < len(left) else []
        used = sum(cell_width(span) for span, _ in left_line)
        rows.append(
            [
                *left_line,
                (" " * (column_width - used), ""),
                (COLUMN_SEPARATOR, "dim"),
                *(right[index] if index < len(right) else []),
            ]
        )
    value_width = max((canvas.width - 22) // 2, 1)
    for title, lines in (("set otherwise", comparison.settings), ("what came of it", comparison.results)):
        if lines:
            rows += [
                [],
                [(fit_text(title, 22), "bold"), (fit_text("A", value_width), "accent"), ("B", "accent")],
            ]
            rows += [
                [
                    (fit_text(_escape(name), 20) + "  ", "dim"),
                    (fit_text(_escape(a), value_width - 1) + " ", ""),
                    (_escape(b), ""),
                ]
                for name, a, b in lines
            ]
    return canvas.format_lines(rows)


def _escape(text: str) -> str:
    return join_pieces(escape_invisible(text))


def _run_lines(run: ComparedRun, comparison: RunComparison, width: int) -> list[list[StyledText]]:
    """The lines of one text, the shared prefix dimmed."""
    title = join_pieces(clip_pieces(escape_invisible(f"{run.name}  {run.request.method}"), width))
    rows: list[list[StyledText]] = [[(title, "bold")], []]
    placed = layout_tokens(node_tokens(run.trace, run.nodes[:MAX_DRAWN_TOKENS]), width)
    return rows + [
        [
            (
                join_pieces(token.pieces),
                "dim"
                if token.token_index < comparison.num_shared_tokens
                else shade_style(run.nodes[token.token_index]),
            )
            for token in line
        ]
        for line in group_by_line(placed)
    ]
