"""Speculative decoding as SVG: accepted and rejected drafts along the text, acceptance by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from descant.tokenization.display import TextPiece, join_pieces
from descant.trace.pictures.draft_view import (
    DraftedForward,
    DraftPositionStats,
    draft_position_stats,
    draft_summary,
    drawn_nodes,
    forward_passes,
    tokens_with_notes,
)
from descant.trace.pictures.node_labels import token_label, tooltip_lines
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg_elements import (
    CELL_WIDTH,
    box,
    caption,
    element,
    line,
    svg_document,
    text,
    titled_group,
)
from descant.trace.pictures.svg_text import LINE_CELLS, MARGIN, draw_heading
from descant.trace.pictures.terminal_cells import cell_width, pieces_width
from descant.trace.pictures.text_layout import layout_tokens
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["svg_speculation"]

TOP: Final = 74.0
LINE_PITCH, TOKEN_HEIGHT = 40.0, 20.0
NOTE_SCALE: Final = 0.82  # font size of a rejected draft relative to a token
MAX_BAR_WIDTH, CHART_HEIGHT = 40.0, 78.0  # of the chart by position


def svg_speculation(trace: TraceData, selection: TraceSelection) -> str:
    """The drafts along one sequence."""
    assert selection.request is not None
    request, passes = trace.requests[selection.request], forward_passes(trace, selection)
    by = [] if request.drafter is None else [f"guessed by {request.drafter}"]
    body = draw_heading(request.method, [*draft_summary(passes), *by])
    nodes = drawn_nodes(passes)
    notes = {one.nodes[-1].number: one for one in passes if one.rejected_drafts}
    note_cells = {
        number: math.ceil(pieces_width(one.rejection_pieces(trace)) * NOTE_SCALE) + 1
        for number, one in notes.items()
    }
    tokens = tokens_with_notes(trace, nodes, note_cells)
    placed = layout_tokens(tokens, LINE_CELLS)
    for token in placed:
        node = nodes[token.token_index]
        note = notes.pop(node.number, None)
        x, y = MARGIN + token.column * CELL_WIDTH, TOP + token.row * LINE_PITCH
        body.append(_draw_token(trace, node, token.pieces, x, y, note))
    y = TOP + (max((token.row for token in placed), default=0) + 1) * LINE_PITCH + 12
    body += _draw_legend(y)
    stats = draft_position_stats(passes)
    if stats:
        y = _draw_chart(stats, y + 34, body)
    summary = ", ".join(draft_summary(passes))
    return svg_document(
        body, LINE_CELLS * CELL_WIDTH + 2 * MARGIN, y + 20, f"Guesses of {request.method}", summary
    )


def _draw_token(
    trace: TraceData, node: Node, pieces: Sequence[TextPiece], x: float, y: float, note: DraftedForward | None
) -> str:
    width = pieces_width(pieces) * CELL_WIDTH
    parts = [text(pieces, x, y + 14.5, "ink")]
    if node.is_draft:
        parts.insert(0, box(x + 0.5, y, width - 1, TOKEN_HEIGHT, "calm", rx=3))
        parts.append(line(x + 2, y + TOKEN_HEIGHT - 1, x + width - 2, y + TOKEN_HEIGHT - 1, "right", 1.6))
    title = tooltip_lines(trace, node, node.state)
    if note is not None:
        parts.append(_draw_rejected(trace, note, x, y + TOKEN_HEIGHT + 11))
        title.append(f"guessed instead: {token_label(trace, note.rejected_drafts[0])}")
    return titled_group(
        title,
        *parts,
        data_node=node.number,
        data_token=node.token,
        data_accepted=1 if node.is_draft else None,
    )


def _draw_rejected(trace: TraceData, note: DraftedForward, x: float, y: float) -> str:
    """The rejected draft token, struck through, and the number of unverified ones after it."""
    pieces = note.rejection_pieces(trace)
    behind = len(note.rejected_drafts) > 1
    struck = join_pieces(pieces[:-1] if behind else pieces)
    x = min(x, MARGIN + (LINE_CELLS - pieces_width(pieces) * NOTE_SCALE) * CELL_WIDTH)
    return element(
        "g",
        text([(struck, False)], x, y, "small bad gone"),
        text([(pieces[-1][0], False)], x + cell_width(struck) * CELL_WIDTH * NOTE_SCALE, y, "small bad")
        if behind
        else "",
        data_token=note.rejected_drafts[0],
        data_accepted=0,
    )


def _draw_legend(y: float) -> list[str]:
    return [
        box(MARGIN, y - 11, 22, 14, "calm", rx=3),
        line(MARGIN + 2, y + 2, MARGIN + 20, y + 2, "right", 1.6),
        caption("guessed, and it stood", MARGIN + 28, y),
        caption("plain: the model's own choice", MARGIN + 172, y),
        text("guess", MARGIN + 358, y, "small bad gone"),
        caption("guessed there instead, +n more behind it", MARGIN + 398, y),
    ]


def _draw_chart(stats: Sequence[DraftPositionStats], y: float, body: list[str]) -> float:
    """Draw the acceptance by draft position; returns the y of its end."""
    body.append(text("guesses that stood, by position", MARGIN, y, "s bold ink"))
    top, max_drafts = y + 26, max(one.num_drafts for one in stats)
    column = min(MAX_BAR_WIDTH, (LINE_CELLS * CELL_WIDTH) / len(stats))
    for index, one in enumerate(stats):
        x = MARGIN + index * column
        tried, accepted = (
            CHART_HEIGHT * one.num_drafts / max_drafts,
            CHART_HEIGHT * one.num_accepted / max_drafts,
        )
        parts = [
            box(x + 3, top + CHART_HEIGHT - tried, column - 6, tried, "sheet frame", rx=2),
            box(x + 3, top + CHART_HEIGHT - accepted, column - 6, accepted, "fine", rx=2)
            if one.num_accepted
            else "",
        ]
        if column >= 30:
            rate = f"{100 * one.num_accepted / one.num_drafts:.0f} %"
            parts.append(
                text(rate, x + column / 2, top + CHART_HEIGHT - tried - 5, "s small quiet", "middle")
            )
        if column >= 14:
            parts.append(
                text(str(index + 1), x + column / 2, top + CHART_HEIGHT + 15, "s small quiet", "middle")
            )
        tooltip = f"guess {index + 1}: {one.num_accepted} of {one.num_drafts} stood"
        body.append(
            titled_group(
                tooltip,
                *parts,
                data_position=index + 1,
                data_tried=one.num_drafts,
                data_stood=one.num_accepted,
            )
        )
    body.append(line(MARGIN, top + CHART_HEIGHT, MARGIN + column * len(stats), top + CHART_HEIGHT, "rule"))
    return top + CHART_HEIGHT + 18
