"""Width of text in terminal cells, and cutting and wrapping by cells."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

from descant.tokenization.display import TextPiece, join_pieces

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


_MIN_SHOWN_PROBABILITY = 0.0005  # smaller ones are shown as "< 0.1 %"


def probability(log: float | None) -> float:
    """The probability of a log-probability; 0 for None."""
    return 0.0 if log is None else math.exp(min(log, 0.0))


def format_percent(log: float | None) -> str:
    """A log-probability as a percentage, such as "12.3 %"."""
    if log is None:
        return "not kept"
    if log == -math.inf:
        return "0 %"
    value = probability(log)
    return "< 0.1 %" if value < _MIN_SHOWN_PROBABILITY else f"{100 * value:.1f} %"


def format_score(score: float | None) -> str:
    """A beam score or log-probability."""
    if score is None:
        return ""
    if math.isinf(score):
        return "−∞" if score < 0 else "∞"
    text = f"{abs(score):.2f}"
    return text if score >= 0 or not float(text) else f"−{text}"


def format_nats(entropy: float) -> str:
    """An entropy."""
    return f"{entropy:.2f} nats"


def pluralize(count: int, noun: str, many: str = "") -> str:
    """A count with its noun: "1 token", "2 tokens"."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def format_bytes(size: int) -> str:
    """A size in the unit that leaves one to three digits."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
