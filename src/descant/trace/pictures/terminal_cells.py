"""How many cells of a terminal a text takes, and texts that are cut to a number of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from descant.tokenization.display import TextPiece, join_pieces

__all__ = ["cell_width", "clip_pieces", "fit_text", "pieces_width", "split_lines", "wrap_pieces"]

_ELLIPSIS = "…"
_EMOJI_SELECTOR = "\ufe0f"  # a narrow sign before it becomes an emoji, which is wide


def cell_width(text: str) -> int:
    """Cells of a text at most: wide characters and emoji take two, marks on a letter none."""
    return sum(map(_char_width, text))


def pieces_width(pieces: Iterable[TextPiece]) -> int:
    """Cells of pieces."""
    return cell_width(join_pieces(pieces))


def clip_pieces(pieces: Sequence[TextPiece], width: int) -> list[TextPiece]:
    """As much of the pieces as there is room for, with an ellipsis where that is not all."""
    if pieces_width(pieces) <= width:
        return list(pieces)
    kept: list[TextPiece] = []
    room = width - 1
    for one, stands in pieces:
        part = one[: _num_fitting_chars(one, room)]
        room -= cell_width(part)
        kept += [(part, stands)] if part else []
        if part != one:
            break
    return [*kept, (_ELLIPSIS, True)] if width > 0 else []


def fit_text(text: str, width: int) -> str:
    """A text that is cut, or filled with spaces, to exactly so many cells."""
    kept = join_pieces(clip_pieces([(text, False)], width))
    return kept + " " * (width - cell_width(kept))


def split_lines(pieces: Sequence[TextPiece], width: int) -> list[list[TextPiece]]:
    """Pieces as lines of so many cells at most, nothing left out."""
    lines: list[list[TextPiece]] = [[]]
    width = max(width, 2)
    room = width
    for one, stands in pieces:
        start = 0
        for at, letter in enumerate(one):
            size = _char_width(letter)
            if size > room:
                lines[-1] += [(one[start:at], stands)] if at > start else []
                lines.append([])
                start, room = at, width
            room -= size
        lines[-1] += [(one[start:], stands)] if one[start:] else []
    return lines


def wrap_pieces(pieces: Sequence[TextPiece], width: int) -> list[list[TextPiece]]:
    """Pieces as lines, cut at spaces where that is possible."""
    lines: list[list[TextPiece]] = [[]]
    for one, stands in pieces:
        words = [one] if stands else [part for part in _split_words(one) if part]
        for part in words:
            if lines[-1] and pieces_width([*lines[-1], (part, stands)]) > width:
                lines.append([])
                part = part.lstrip(" ") or part
            if pieces_width([(part, stands)]) > width:
                more = split_lines([(part, stands)], width)
                lines[-1] += more[0]
                lines += more[1:]
            else:
                lines[-1].append((part, stands))
    return [one for one in lines if one] or [[]]


def _split_words(said: str) -> list[str]:
    """A text cut before each space."""
    parts = said.split(" ")
    return [parts[0], *(f" {part}" for part in parts[1:])]


def _num_fitting_chars(text: str, room: int) -> int:
    """How many characters of a text have room; a mark stays with its letter."""
    for at, one in enumerate(text):
        room -= _char_width(one)
        if room < 0:
            return at
    return len(text)


def _char_width(one: str) -> int:
    if one == _EMOJI_SELECTOR:
        return 1
    if unicodedata.category(one) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
