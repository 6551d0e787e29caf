"""Guesses for a terminal: those that stood and those that did not along the text, and how far they reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.draft_view import (
    draft_position_stats,
    draft_summary,
    forward_passes,
    tokens_with_notes,
)
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width
from descant.trace.pictures.terminal_processors import horizontal_bar
from descant.trace.pictures.terminal_text import group_by_line, repeat_marks
from descant.trace.pictures.text_layout import layout_tokens

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_speculation"]

REJECTED_MARK: Final = "✗"
ACCEPTED_MARK: Final = "━"


def terminal_speculation(trace: Trace, where: TraceSelection, paper: TerminalCanvas) -> str:
    """The guesses along one sequence."""
    assert where.request is not None
    asked, passes = trace.requests[where.request], forward_passes(trace, where)
    by = [] if asked.drafter is None else [f"guessed by {asked.drafter}"]
    rows: list[list[StyledText]] = [
        *paper.wrap_text(asked.method, "bold"),
        *paper.wrap_text(", ".join([*draft_summary(passes), *by])),
        [],
    ]
    nodes, notes = [node for one in passes for node in one.nodes], {}
    for one in passes:
        if one.rejected_drafts:
            notes[one.nodes[-1].number] = REJECTED_MARK + join_pieces(one.rejection_pieces(trace))
    placed = tokens_with_notes(trace, nodes, {number: cell_width(said) + 1 for number, said in notes.items()})
    for line in group_by_line(layout_tokens(placed, max(paper.width, 1))):
        own = [nodes[bit.token_index] for bit in line]
        rows.append(
            [
                (
                    join_pieces(bit.pieces) + " " * (bit.width - cell_width(join_pieces(bit.pieces))),
                    "good under" if node.is_draft else "",
                )
                for bit, node in zip(line, own, strict=True)
            ]
        )
        if not paper.colour and any(node.is_draft for node in own):
            rows.append(
                repeat_marks(line, lambda bit: ACCEPTED_MARK if nodes[bit.token_index].is_draft else " ")
            )
        below, at = list[StyledText](), 0
        for bit, node in zip(line, own, strict=True):
            said = notes.pop(node.number, "")
            if said:
                column = max(min(bit.column, paper.width - cell_width(said)), at)
                below += [(" " * (column - at), ""), (said, "bad")]
                at = column + cell_width(said)
        rows += [below] if below else []
    stood = "underlined" if paper.colour else ACCEPTED_MARK
    rows += [
        [],
        *paper.wrap_text(
            f"{stood} guessed, and it stood   {REJECTED_MARK} guessed there instead, +n more behind it"
        ),
    ]
    reach = draft_position_stats(passes)
    rows += [[], [("guesses that stood, by position", "bold")]] if reach else []
    for at, place in enumerate(reach, 1):
        said = f" {100 * place.num_accepted / place.num_drafts:3.0f} %  {place.num_accepted} of {place.num_drafts}"
        room = max(min(paper.width - 4 - cell_width(said), 40), 0)
        rows.append(
            [
                (f"{at:>3} ", "dim"),
                (horizontal_bar(place.num_accepted / place.num_drafts, room), "good"),
                (said, ""),
            ]
        )
    return paper.format_lines(rows)
