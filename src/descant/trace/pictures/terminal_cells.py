"""Width of text in terminal cells, and cutting and wrapping by cells."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from descant.tokenization.display import TextPiece, join_pieces

__all__ = ["cell_width", "clip_pieces", "fit_text", "pieces_width", "split_lines", "wrap_pieces"]

_ELLIPSIS = "…"
_EMOJI_SELECTOR = "\ufe0f"  # turns the narrow character before it into a wide emoji


def cell_width(text: str) -> int:
    """Upper bound of the cells of a text: wide characters and emoji take two, combining marks none."""
    return sum(map(_char_width, text))


def pieces_width(pieces: Iterable[TextPiece]) -> int:
    """The cells of pieces."""
    return cell_width(join_pieces(pieces))


def clip_pieces(pieces: Sequence[TextPiece], width: int) -> list[TextPiece]:
    """Pieces cut to `width` cells, with an ellipsis if cut."""
    if pieces_width(pieces) <= width:
        return list(pieces)
    clipped: list[TextPiece] = []
    cells_left = width - 1
    for text, is_escaped in pieces:
        part = text[: _num_fitting_chars(text, cells_left)]
        cells_left -= cell_width(part)
        clipped += [(part, is_escaped)] if part else []
        if part != text:
            break
    return [*clipped, (_ELLIPSIS, True)] if width > 0 else []


def fit_text(text: str, width: int) -> str:
    """A text cut or padded with spaces to exactly `width` cells."""
    clipped = join_pieces(clip_pieces([(text, False)], width))
    return clipped + " " * (width - cell_width(clipped))


def split_lines(pieces: Sequence[TextPiece], width: int) -> list[list[TextPiece]]:
    """Pieces split into lines of at most `width` cells."""
    lines: list[list[TextPiece]] = [[]]
    width = max(width, 2)
    cells_left = width
    for text, is_escaped in pieces:
        start = 0
        for index, letter in enumerate(text):
            size = _char_width(letter)
            if size > cells_left:
                lines[-1] += [(text[start:index], is_escaped)] if index > start else []
                lines.append([])
                start, cells_left = index, width
            cells_left -= size
        lines[-1] += [(text[start:], is_escaped)] if text[start:] else []
    return lines


def wrap_pieces(pieces: Sequence[TextPiece], width: int) -> list[list[TextPiece]]:
    """Pieces wrapped into lines, at spaces if possible."""
    lines: list[list[TextPiece]] = [[]]
    for text, is_escaped in pieces:
        words = [text] if is_escaped else [part for part in _split_words(text) if part]
        for part in words:
            if lines[-1] and pieces_width([*lines[-1], (part, is_escaped)]) > width:
                lines.append([])
                part = part.lstrip(" ") or part
            if pieces_width([(part, is_escaped)]) > width:
                split = split_lines([(part, is_escaped)], width)
                lines[-1] += split[0]
                lines += split[1:]
            else:
                lines[-1].append((part, is_escaped))
    return [text for text in lines if text] or [[]]


def _split_words(text: str) -> list[str]:
    """A text split before each space."""
    parts = text.split(" ")
    return [parts[0], *(f" {part}" for part in parts[1:])]


def _num_fitting_chars(text: str, cells_left: int) -> int:
    """The number of characters that fit; a combining mark stays with its base character."""
    for index, char in enumerate(text):
        cells_left -= _char_width(char)
        if cells_left < 0:
            return index
    return len(text)


def _char_width(char: str) -> int:
    if char == _EMOJI_SELECTOR:
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
