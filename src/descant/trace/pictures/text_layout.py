"""Layout of tokens on lines of a given width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from descant.tokenization.display import TextPiece
from descant.trace.pictures.terminal_cells import pieces_width, split_lines

__all__ = ["LayoutToken", "PlacedToken", "layout_tokens"]


@dataclass(frozen=True)
class LayoutToken:
    """A token to be placed."""

    pieces: Sequence[TextPiece]
    min_width: int = 0  # cells
    ends_line: bool = False


@dataclass(frozen=True)
class PlacedToken:
    """A placed token, or a part of one that is longer than a line."""

    token_index: int
    pieces: Sequence[TextPiece]
    row: int
    column: int
    width: int  # cells


def layout_tokens(tokens: Sequence[LayoutToken], width: int) -> list[PlacedToken]:
    """Place tokens on lines; tokens of one word stay together if they fit on a line."""
    placed: list[PlacedToken] = []
    row, column = 0, 0
    for group in _unbreakable_groups(tokens):
        needed = sum(_token_width(tokens[index]) for index in group)
        if column and column + needed > width:
            row, column = row + 1, 0
        for index in group:
            for part in split_lines(tokens[index].pieces, width):
                size = min(max(pieces_width(part), tokens[index].min_width), width)
                if column and column + size > width:
                    row, column = row + 1, 0
                placed.append(PlacedToken(index, part, row, column, size))
                column += size
        if tokens[group[-1]].ends_line:
            row, column = row + 1, 0
    return placed


def _token_width(token: LayoutToken) -> int:
    return max(pieces_width(token.pieces), token.min_width)


def _unbreakable_groups(tokens: Sequence[LayoutToken]) -> Iterable[list[int]]:
    """Indices of tokens between which a line should not break."""
    group: list[int] = []
    for index, token in enumerate(tokens):
        first = token.pieces[0] if token.pieces else ("", False)
        if group and (tokens[index - 1].ends_line or first[1] or not first[0] or not first[0][0].isalnum()):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
