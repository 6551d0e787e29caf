"""Guesses for a terminal: those that stood and those that did not along the text, and how far they reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain
from descant.trace.pictures.draft_view import forwards, positions, spaced, summary
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_canvas import Paper, Span
from descant.trace.pictures.terminal_cells import cells
from descant.trace.pictures.terminal_processors import bar
from descant.trace.pictures.terminal_text import by_row, spread
from descant.trace.pictures.text_layout import flow

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_speculation"]

WRONG: Final = "✗"
STOOD: Final = "━"


def terminal_speculation(trace: Trace, where: Where, paper: Paper) -> str:
    """The guesses along one sequence."""
    assert where.request is not None
    asked, passes = trace.requests[where.request], forwards(trace, where)
    by = [] if asked.drafter is None else [f"guessed by {asked.drafter}"]
    rows: list[list[Span]] = [
        *paper.told(asked.method, "bold"),
        *paper.told(", ".join([*summary(passes), *by])),
        [],
    ]
    nodes, notes = [node for one in passes for node in one.nodes], {}
    for one in passes:
        if one.rejected:
            notes[one.nodes[-1].number] = WRONG + plain(one.rejection(trace))
    placed = spaced(trace, nodes, {number: cells(said) + 1 for number, said in notes.items()})
    for line in by_row(flow(placed, max(paper.width, 1))):
        own = [nodes[bit.at] for bit in line]
        rows.append(
            [
                (
                    plain(bit.pieces) + " " * (bit.width - cells(plain(bit.pieces))),
                    "good under" if node.guessed else "",
                )
                for bit, node in zip(line, own, strict=True)
            ]
        )
        if not paper.colour and any(node.guessed for node in own):
            rows.append(spread(line, lambda bit: STOOD if nodes[bit.at].guessed else " "))
        below, at = list[Span](), 0
        for bit, node in zip(line, own, strict=True):
            said = notes.pop(node.number, "")
            if said:
                column = max(min(bit.column, paper.width - cells(said)), at)
                below += [(" " * (column - at), ""), (said, "bad")]
                at = column + cells(said)
        rows += [below] if below else []
    stood = "underlined" if paper.colour else STOOD
    rows += [
        [],
        *paper.told(f"{stood} guessed, and it stood   {WRONG} guessed there instead, +n more behind it"),
    ]
    reach = positions(passes)
    rows += [[], [("guesses that stood, by position", "bold")]] if reach else []
    for at, place in enumerate(reach, 1):
        said = f" {100 * place.stood / place.tried:3.0f} %  {place.stood} of {place.tried}"
        room = max(min(paper.width - 4 - cells(said), 40), 0)
        rows.append([(f"{at:>3} ", "dim"), (bar(place.stood / place.tried, room), "good"), (said, "")])
    return paper.lines(rows)
