"""Two runs side by side as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.comparison import ComparedRun, ComparisonRow, RunComparison, compare_runs
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg_elements import CELL_WIDTH, box, caption, line, svg_document, text
from descant.trace.pictures.svg_text import (
    LINE_CELLS,
    MARGIN,
    draw_heading,
    draw_shade_legend,
    draw_shaded_token,
)
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.pictures.text_layout import layout_tokens
from descant.trace.pictures.text_stats import MAX_DRAWN_TOKENS, node_tokens
from descant.trace.token_text import text_pieces
from descant.trace.trace_data import TraceData

__all__ = ["svg_beside"]

WIDTH: Final = LINE_CELLS * CELL_WIDTH + 2 * MARGIN
COLUMN_CELLS: Final = 40  # width of a column
GAP_CELLS: Final = 4  # between the columns
TOP, LINE_PITCH = 104.0, 25.0


def svg_beside(trace: TraceData, selection: TraceSelection, beside: TraceData | None) -> str:
    """Two texts, their different settings and their results."""
    comparison = compare_runs(trace, selection, beside)
    body = draw_heading("Two runs side by side", [comparison.divergence_text()])
    ends = [
        _draw_run(run, comparison, MARGIN + index * (COLUMN_CELLS + GAP_CELLS) * CELL_WIDTH, body)
        for index, run in enumerate(comparison.runs)
    ]
    middle = MARGIN + (COLUMN_CELLS + GAP_CELLS / 2) * CELL_WIDTH
    body.append(line(middle, TOP - 28, middle, max(ends) + 4, "frame"))
    y = max(ends) + 30
    body += [*draw_shade_legend(MARGIN, y), *_divergence_legend(comparison, y + 22)]
    y += 58
    for title, lines in (("set otherwise", comparison.settings), ("what came of it", comparison.results)):
        if lines:
            y = _draw_table(title, lines, y, body)
    texts = (f"{run.name}: {join_pieces(_run_text(run))}" for run in comparison.runs)
    return svg_document(
        body, WIDTH, y, "Two runs side by side", f"{comparison.divergence_text()}. {' '.join(texts)}"
    )


def _run_text(run: ComparedRun) -> list[tuple[str, bool]]:
    nodes = run.nodes[:MAX_DRAWN_TOKENS]
    return text_pieces(run.trace, [node.token for node in nodes if node.token is not None])


def _draw_run(run: ComparedRun, comparison: RunComparison, x: float, body: list[str]) -> float:
    """Draw one text, the shared prefix greyed; returns the y of its end."""
    body += [
        box(x, TOP - 26, 18, 18, "wash", rx=4),
        text(run.name, x + 9, TOP - 12.5, "s bold accent note", "middle"),
        text(
            clip_pieces(escape_invisible(run.request.method), COLUMN_CELLS - 4),
            x + 26,
            TOP - 12.5,
            "s bold ink",
        ),
    ]
    placed = layout_tokens(node_tokens(run.trace, run.nodes[:MAX_DRAWN_TOKENS]), COLUMN_CELLS)
    marked = False
    for token in placed:
        left, y = x + token.column * CELL_WIDTH, TOP + token.row * LINE_PITCH
        if token.token_index < comparison.num_shared_tokens:
            body.append(text(token.pieces, left, y + 14.5, "quiet"))
            continue
        if not marked and comparison.num_shared_tokens:
            body.append(line(left, y - 2, left, y + 22, "strong", 2))
        marked = True
        body.append(draw_shaded_token(run.trace, run.nodes[token.token_index], token, left, y))
    return TOP + (max((token.row for token in placed), default=0) + 1) * LINE_PITCH


def _divergence_legend(comparison: RunComparison, y: float) -> list[str]:
    if not comparison.num_shared_tokens:
        return []
    return [
        line(MARGIN + 2, y - 11, MARGIN + 2, y + 3, "strong", 2),
        caption("from here on they differ; before it, quiet, they are the same", MARGIN + 28, y),
    ]


def _draw_table(title: str, lines: Sequence[ComparisonRow], y: float, body: list[str]) -> float:
    """Draw a table of names and values; returns the y of its end."""
    first, second = MARGIN + 26 * CELL_WIDTH, MARGIN + 54 * CELL_WIDTH
    body += [
        text(title, MARGIN, y, "s bold ink"),
        text("A", first, y, "s bold accent"),
        text("B", second, y, "s bold accent"),
        line(MARGIN, y + 7, WIDTH - MARGIN, y + 7, "frame"),
    ]
    y += 24
    for name, one, other in lines:
        body += [
            text(clip_pieces(escape_invisible(name), 25), MARGIN, y, "note quiet"),
            text(clip_pieces(escape_invisible(one), 30), first, y, "note ink"),
            text(clip_pieces(escape_invisible(other), 32), second, y, "note ink"),
        ]
        y += 18
    return y + 18
