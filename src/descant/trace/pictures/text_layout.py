"""Tokens of a running text on lines of so many cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from descant.tokenization.display import TextPiece
from descant.trace.pictures.terminal_cells import pieces_width, split_lines

__all__ = ["LayoutToken", "PlacedToken", "layout_tokens"]


@dataclass(frozen=True)
class LayoutToken:
    """A token that is to be placed."""

    pieces: Sequence[TextPiece]
    min_width: int = 0  # cells that it needs at least
    ends_line: bool = False  # a line


@dataclass(frozen=True)
class PlacedToken:
    """A token, or a part of one that is longer than a line, in its place."""

    token_index: int  # which token
    pieces: Sequence[TextPiece]
    row: int
    column: int
    width: int  # cells


def layout_tokens(words: Sequence[LayoutToken], width: int) -> list[PlacedToken]:
    """The tokens in their places: tokens of one word stay together where a line has room for all of them."""
    bits: list[PlacedToken] = []
    row, column = 0, 0
    for group in _unbreakable_groups(words):
        needed = sum(_token_width(words[at]) for at in group)
        if column and column + needed > width:
            row, column = row + 1, 0
        for at in group:
            for part in split_lines(words[at].pieces, width):
                size = min(max(pieces_width(part), words[at].min_width), width)
                if column and column + size > width:
                    row, column = row + 1, 0
                bits.append(PlacedToken(at, part, row, column, size))
                column += size
        if words[group[-1]].ends_line:
            row, column = row + 1, 0
    return bits


def _token_width(word: LayoutToken) -> int:
    return max(pieces_width(word.pieces), word.min_width)


def _unbreakable_groups(words: Sequence[LayoutToken]) -> Iterable[list[int]]:
    """The places of tokens between which a line should not end."""
    group: list[int] = []
    for at, one in enumerate(words):
        first = one.pieces[0] if one.pieces else ("", False)
        if group and (words[at - 1].ends_line or first[1] or not first[0] or not first[0][0].isalnum()):
            yield group
            group = []
        group.append(at)
    if group:
        yield group
