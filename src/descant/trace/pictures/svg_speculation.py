"""Guesses as SVG: those that stood and those that did not along the text, and how far they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import Piece, plain
from descant.trace.pictures.draft_view import Forward, Position, forwards, positions, spaced, summary
from descant.trace.pictures.drawing import CELL, box, caption, document, element, line, text, titled
from descant.trace.pictures.legend import named, said_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.svg_text import COLUMNS, MARGIN, heading
from descant.trace.pictures.terminal_cells import cells, width_of
from descant.trace.pictures.text_layout import flow
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_speculation"]

TOP: Final = 74.0
PITCH, TALL = 40.0, 20.0
LESS: Final = 0.82  # letters of a rejected guess to those of a token
COLUMN, HIGH = 40.0, 78.0  # of the chart by position


def svg_speculation(trace: Trace, where: Where) -> str:
    """The guesses along one sequence."""
    assert where.request is not None
    asked, passes = trace.requests[where.request], forwards(trace, where)
    by = [] if asked.drafter is None else [f"guessed by {asked.drafter}"]
    body = heading(asked.method, [*summary(passes), *by])
    nodes = [node for one in passes for node in one.nodes]
    notes = {one.nodes[-1].number: one for one in passes if one.rejected}
    room = {number: math.ceil(width_of(one.rejection(trace)) * LESS) + 1 for number, one in notes.items()}
    placed = spaced(trace, nodes, room)
    bits = flow(placed, COLUMNS)
    for bit in bits:
        node = nodes[bit.at]
        note = notes.pop(node.number, None)
        x, y = MARGIN + bit.column * CELL, TOP + bit.row * PITCH
        body.append(_token(trace, node, bit.pieces, x, y, note))
    y = TOP + (max((bit.row for bit in bits), default=0) + 1) * PITCH + 12
    body += _legend(y)
    reach = positions(passes)
    if reach:
        y = _chart(reach, y + 34, body)
    told = ", ".join(summary(passes))
    return document(body, COLUMNS * CELL + 2 * MARGIN, y + 20, f"Guesses of {asked.method}", told)


def _token(
    trace: Trace, node: Node, pieces: Sequence[Piece], x: float, y: float, note: Forward | None
) -> str:
    width = width_of(pieces) * CELL
    parts = [text(pieces, x, y + 14.5, "ink")]
    if node.guessed:
        parts.insert(0, box(x + 0.5, y, width - 1, TALL, "calm", rx=3))
        parts.append(line(x + 2, y + TALL - 1, x + width - 2, y + TALL - 1, "right", 1.6))
    title = said_of(trace, node, node.state)
    if note is not None:
        parts.append(_rejected(trace, note, x, y + TALL + 11))
        title.append(f"guessed instead: {named(trace, note.rejected[0])}")
    return titled(
        title, *parts, data_node=node.number, data_token=node.token, data_accepted=1 if node.guessed else None
    )


def _rejected(trace: Trace, note: Forward, x: float, y: float) -> str:
    """The guess that did not stand, struck, and how many behind it were never judged."""
    pieces = note.rejection(trace)
    behind = len(note.rejected) > 1
    struck = plain(pieces[:-1] if behind else pieces)
    x = min(x, MARGIN + (COLUMNS - width_of(pieces) * LESS) * CELL)
    return element(
        "g",
        text([(struck, False)], x, y, "small bad gone"),
        text([(pieces[-1][0], False)], x + cells(struck) * CELL * LESS, y, "small bad") if behind else "",
        data_token=note.rejected[0],
        data_accepted=0,
    )


def _legend(y: float) -> list[str]:
    return [
        box(MARGIN, y - 11, 22, 14, "calm", rx=3),
        line(MARGIN + 2, y + 2, MARGIN + 20, y + 2, "right", 1.6),
        caption("guessed, and it stood", MARGIN + 28, y),
        caption("plain: the model's own choice", MARGIN + 172, y),
        text("guess", MARGIN + 358, y, "small bad gone"),
        caption("guessed there instead, +n more behind it", MARGIN + 398, y),
    ]


def _chart(reach: Sequence[Position], y: float, body: list[str]) -> float:
    """How often guesses stood, by their place; where it ends."""
    body.append(text("guesses that stood, by position", MARGIN, y, "s bold ink"))
    top, most = y + 26, max(one.tried for one in reach)
    column = min(COLUMN, (COLUMNS * CELL) / len(reach))
    for at, one in enumerate(reach):
        x = MARGIN + at * column
        tried, stood = HIGH * one.tried / most, HIGH * one.stood / most
        parts = [
            box(x + 3, top + HIGH - tried, column - 6, tried, "sheet frame", rx=2),
            box(x + 3, top + HIGH - stood, column - 6, stood, "fine", rx=2) if one.stood else "",
        ]
        if column >= 30:
            rate = f"{100 * one.stood / one.tried:.0f} %"
            parts.append(text(rate, x + column / 2, top + HIGH - tried - 5, "s small quiet", "middle"))
        if column >= 14:
            parts.append(text(str(at + 1), x + column / 2, top + HIGH + 15, "s small quiet", "middle"))
        said = f"guess {at + 1}: {one.stood} of {one.tried} stood"
        body.append(titled(said, *parts, data_position=at + 1, data_tried=one.tried, data_stood=one.stood))
    body.append(line(MARGIN, top + HIGH, MARGIN + column * len(reach), top + HIGH, "rule"))
    return top + HIGH + 18
