"""Speculative decoding for a terminal: accepted and rejected drafts, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.draft_view import (
    DraftPositionStats,
    draft_position_stats,
    draft_summary,
    drawn_nodes,
    forward_passes,
    tokens_with_notes,
)
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width
from descant.trace.pictures.terminal_processors import horizontal_bar
from descant.trace.pictures.terminal_text import group_by_line, repeat_marks
from descant.trace.pictures.text_layout import layout_tokens
from descant.trace.trace_data import TraceData

__all__ = ["terminal_speculation"]

REJECTED_MARK: Final = "✗"
ACCEPTED_MARK: Final = "━"


def terminal_speculation(trace: TraceData, selection: TraceSelection, canvas: TerminalCanvas) -> str:
    """The drafts along one sequence."""
    assert selection.request is not None
    request, passes = trace.requests[selection.request], forward_passes(trace, selection)
    by = [] if request.drafter is None else [f"guessed by {request.drafter}"]
    rows: list[list[StyledText]] = [
        *canvas.wrap_text(request.method, "bold"),
        *canvas.wrap_text(", ".join([*draft_summary(passes), *by])),
        [],
    ]
    nodes, notes = drawn_nodes(passes), {}
    for one in passes:
        if one.rejected_drafts:
            notes[one.nodes[-1].number] = REJECTED_MARK + join_pieces(one.rejection_pieces(trace))
    placed = tokens_with_notes(trace, nodes, {number: cell_width(note) + 1 for number, note in notes.items()})
    for line in group_by_line(layout_tokens(placed, max(canvas.width, 1))):
        line_nodes = [nodes[token.token_index] for token in line]
        rows.append(
            [
                (
                    join_pieces(token.pieces) + " " * (token.width - cell_width(join_pieces(token.pieces))),
                    "good under" if node.is_draft else "",
                )
                for token, node in zip(line, line_nodes, strict=True)
            ]
        )
        if not canvas.colour and any(node.is_draft for node in line_nodes):
            rows.append(
                repeat_marks(line, lambda token: ACCEPTED_MARK if nodes[token.token_index].is_draft else " ")
            )
        below, at = list[StyledText](), 0
        for token, node in zip(line, line_nodes, strict=True):
            note = notes.pop(node.number, "")
            if note:
                column = max(min(token.column, canvas.width - cell_width(note)), at)
                below += [(" " * (column - at), ""), (note, "bad")]
                at = column + cell_width(note)
        rows += [below] if below else []
    accepted = "underlined" if canvas.colour else ACCEPTED_MARK
    rejected = f"{REJECTED_MARK} guessed there instead, +n more behind it"
    rows += [[], *canvas.wrap_text(f"{accepted} guessed, and it stood   {rejected}")]
    return canvas.format_lines([*rows, *_chart_lines(draft_position_stats(passes), canvas.width)])


def _chart_lines(stats: Sequence[DraftPositionStats], width: int) -> list[list[StyledText]]:
    """Acceptance by draft position, as bars."""
    rows: list[list[StyledText]] = [[], [("guesses that stood, by position", "bold")]] if stats else []
    for number, position in enumerate(stats, 1):
        rate = position.num_accepted / position.num_drafts
        note = f" {100 * rate:3.0f} %  {position.num_accepted} of {position.num_drafts}"
        bar_cells = max(min(width - 4 - cell_width(note), 40), 0)
        rows.append([(f"{number:>3} ", "dim"), (horizontal_bar(rate, bar_cells), "good"), (note, "")])
    return rows
