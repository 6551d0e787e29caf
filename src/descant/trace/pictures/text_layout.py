"""Tokens of a running text on lines of so many cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from descant.tokenization.display import Piece
from descant.trace.pictures.terminal_cells import cut, width_of

__all__ = ["Bit", "Word", "flow"]


@dataclass(frozen=True)
class Word:
    """A token that is to be placed."""

    pieces: Sequence[Piece]
    room: int = 0  # cells that it needs at least
    ends: bool = False  # a line


@dataclass(frozen=True)
class Bit:
    """A token, or a part of one that is longer than a line, in its place."""

    at: int  # which token
    pieces: Sequence[Piece]
    row: int
    column: int
    width: int  # cells


def flow(words: Sequence[Word], width: int) -> list[Bit]:
    """The tokens in their places: tokens of one word stay together where a line has room for all of them."""
    bits: list[Bit] = []
    row, column = 0, 0
    for group in _together(words):
        needed = sum(_width(words[at]) for at in group)
        if column and column + needed > width:
            row, column = row + 1, 0
        for at in group:
            for part in cut(words[at].pieces, width):
                size = min(max(width_of(part), words[at].room), width)
                if column and column + size > width:
                    row, column = row + 1, 0
                bits.append(Bit(at, part, row, column, size))
                column += size
        if words[group[-1]].ends:
            row, column = row + 1, 0
    return bits


def _width(word: Word) -> int:
    return max(width_of(word.pieces), word.room)


def _together(words: Sequence[Word]) -> Iterable[list[int]]:
    """The places of tokens between which a line should not end."""
    group: list[int] = []
    for at, one in enumerate(words):
        first = one.pieces[0] if one.pieces else ("", False)
        if group and (words[at - 1].ends or first[1] or not first[0] or not first[0][0].isalnum()):
            yield group
            group = []
        group.append(at)
    if group:
        yield group
