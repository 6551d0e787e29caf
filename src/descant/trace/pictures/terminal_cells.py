"""How many cells of a terminal a text takes, and texts that are cut to a number of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from descant.tokenization.display import Piece, plain

__all__ = ["cells", "clipped", "cut", "fitted", "width_of", "wrapped"]

_MORE = "…"
_PICTURED = "\ufe0f"  # a narrow sign before it becomes an emoji, which is wide


def cells(text: str) -> int:
    """Cells of a text at most: wide characters and emoji take two, marks on a letter none."""
    return sum(map(_cells, text))


def width_of(pieces: Iterable[Piece]) -> int:
    """Cells of pieces."""
    return cells(plain(pieces))


def clipped(pieces: Sequence[Piece], width: int) -> list[Piece]:
    """As much of the pieces as there is room for, with an ellipsis where that is not all."""
    if width_of(pieces) <= width:
        return list(pieces)
    kept: list[Piece] = []
    room = width - 1
    for one, stands in pieces:
        part = one[: _fitting(one, room)]
        room -= cells(part)
        kept += [(part, stands)] if part else []
        if part != one:
            break
    return [*kept, (_MORE, True)] if width > 0 else []


def fitted(text: str, width: int) -> str:
    """A text that is cut, or filled with spaces, to exactly so many cells."""
    kept = plain(clipped([(text, False)], width))
    return kept + " " * (width - cells(kept))


def cut(pieces: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Pieces as lines of so many cells at most, nothing left out."""
    lines: list[list[Piece]] = [[]]
    width = max(width, 2)
    room = width
    for one, stands in pieces:
        start = 0
        for at, letter in enumerate(one):
            size = _cells(letter)
            if size > room:
                lines[-1] += [(one[start:at], stands)] if at > start else []
                lines.append([])
                start, room = at, width
            room -= size
        lines[-1] += [(one[start:], stands)] if one[start:] else []
    return lines


def wrapped(pieces: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Pieces as lines, cut at spaces where that is possible."""
    lines: list[list[Piece]] = [[]]
    for one, stands in pieces:
        words = [one] if stands else [part for part in _words(one) if part]
        for part in words:
            if lines[-1] and width_of([*lines[-1], (part, stands)]) > width:
                lines.append([])
                part = part.lstrip(" ") or part
            if width_of([(part, stands)]) > width:
                more = cut([(part, stands)], width)
                lines[-1] += more[0]
                lines += more[1:]
            else:
                lines[-1].append((part, stands))
    return [one for one in lines if one] or [[]]


def _words(said: str) -> list[str]:
    """A text cut before each space."""
    parts = said.split(" ")
    return [parts[0], *(f" {part}" for part in parts[1:])]


def _fitting(text: str, room: int) -> int:
    """How many characters of a text have room; a mark stays with its letter."""
    for at, one in enumerate(text):
        room -= _cells(one)
        if room < 0:
            return at
    return len(text)


def _cells(one: str) -> int:
    if one == _PICTURED:
        return 1
    if unicodedata.category(one) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
