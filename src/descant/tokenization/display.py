"""Display of token text: invisible and control characters are escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

TextPiece = tuple[str, bool]  # the displayed text, and whether it is an escape

_SYMBOLS: Final = {"\n": "↵", "\t": "⇥"}
_VISIBLE_SPACE: Final = "·"
_DOTTED_CIRCLE: Final = "◌"  # base of a combining mark without a letter
_MAX_MARKS: Final = 3  # on one letter; more would overlap the lines above
_HIDDEN_CATEGORIES: Final = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
# Invisible characters outside of the hidden categories: Unicode's "default ignorable" and the Braille blank.
_BLANK_CHARS: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_ZERO_WIDTH_JOINER: Final = "\u200d"
_EMOJI_SELECTOR: Final = "\ufe0f"  # turns the character before into an emoji
# In running text on a terminal: line ends, tabs, spaces of all widths, and joiners, which many scripts need.
_RUNNING_TEXT: Final = "\n\t\u00a0\u1680\u202f\u205f\u3000\u200c\u200d\ufe0f" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_CONTEXT: Final = 8  # characters before a piece that decide how its first marks are shown
_ESCAPED_BYTES: Final = range(0xDC80, 0xDD00)  # invalid UTF-8 bytes decoded with "surrogateescape"


def escape_invisible(text: str, mark_spaces: bool = False, keep: str = "") -> list[TextPiece]:
    """The pieces of a text, safe to display; the characters in `keep` are not escaped.

    With `mark_spaces` leading spaces become dots.
    """
    if text.isascii() and text.isprintable() and not (mark_spaces and text.startswith(" ")):
        return [(text, False)] if text else []
    groups = groupby(_escape_chars(text, mark_spaces, keep), key=lambda piece: piece[1])
    return [(join_pieces(group), is_escape) for is_escape, group in groups]


class RunningText:
    """Untrusted text in pieces for a terminal: control, reordering and invisible characters are escaped.

    Every character is judged by itself, so a control sequence split over pieces is escaped as well. Of the
    text before a piece only its end is kept, for marks that combine with it.
    """

    def __init__(self) -> None:
        self._context = ""

    def escape(self, text: str) -> str:
        """The next piece, safe to show."""
        if text.isascii() and text.isprintable():
            shown = text
        else:
            before = join_pieces(escape_invisible(self._context, keep=_RUNNING_TEXT))
            shown = join_pieces(escape_invisible(self._context + text, keep=_RUNNING_TEXT))[len(before) :]
        self._context = (self._context + text)[-_CONTEXT:]
        return shown


def is_hidden(char: str) -> bool:
    """Whether a character is invisible, controls a terminal or reorders text; a plain space is not."""
    return char != " " and _is_hidden(char, unicodedata.category(char))


def join_pieces(pieces: Iterable[TextPiece]) -> str:
    """The pieces as one string."""
    return "".join(text for text, _ in pieces)


def _escape_chars(text: str, mark_spaces: bool, keep: str) -> Iterator[TextPiece]:
    """Each character, or its escape."""
    has_started, num_marks, has_base = False, 0, False  # marks on the letter before, and whether there is one
    for index, char in enumerate(text):
        category = unicodedata.category(char)
        if char == " ":
            yield (char, False) if has_started or not mark_spaces else (_VISIBLE_SPACE, True)
            num_marks, has_base = 0, False
            continue
        has_started = True
        if category[0] == "M" and char not in _BLANK_CHARS:
            num_marks += 1
            if num_marks > _MAX_MARKS:
                yield _code_point_label(char), True
            elif has_base:
                yield char, False
            else:
                yield _DOTTED_CIRCLE + char, True
            continue
        is_escaped = _is_hidden(char, category) and char not in keep and not _is_emoji_part(text, index)
        yield (_SYMBOLS.get(char) or _code_point_label(char), True) if is_escaped else (char, False)
        num_marks, has_base = 0, not is_escaped


def _is_hidden(char: str, category: str) -> bool:
    return category in _HIDDEN_CATEGORIES or char in _BLANK_CHARS


def _is_emoji_part(text: str, index: int) -> bool:
    """Whether the character is part of a complete emoji."""
    if text[index] == _EMOJI_SELECTOR:
        return index > 0 and (_is_pictograph(text[index - 1]) or text[index - 1] in "0123456789#*")
    if text[index] != _ZERO_WIDTH_JOINER or not 0 < index < len(text) - 1:
        return False
    before = text[index - 2] if text[index - 1] == _EMOJI_SELECTOR and index > 1 else text[index - 1]
    return _is_pictograph(before) and _is_pictograph(text[index + 1])


def _is_pictograph(char: str) -> bool:
    """Whether it is a pictograph or a skin tone modifier."""
    is_symbol = unicodedata.category(char) == "So" and char not in _BLANK_CHARS
    return is_symbol or "\U0001f3fb" <= char <= "\U0001f3ff"


def _code_point_label(char: str) -> str:
    number = ord(char)
    return f"‹{number - 0xDC00:02X}›" if number in _ESCAPED_BYTES else f"‹U+{number:04X}›"
