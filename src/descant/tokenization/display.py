"""Texts as a picture shows them: everything that cannot be seen, or that would be obeyed, is spelt out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

__all__ = ["TextPiece", "escape_invisible", "join_pieces"]

TextPiece = tuple[str, bool]  # what is shown, and whether it stands for something else

_SYMBOLS: Final = {"\n": "↵", "\t": "⇥"}
_VISIBLE_SPACE: Final = "·"
_DOTTED_CIRCLE: Final = "◌"  # what a mark that has no letter is shown on
_MAX_MARKS: Final = 3  # on one letter; no language needs more, and a heap of them hides the lines above
_HIDDEN_CATEGORIES: Final = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
# Letters, marks and signs by their category, and yet nothing is to be seen: Unicode's "default ignorable"
# that are in no hidden category, and the blank of Braille.
_BLANK_CHARS: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_ZERO_WIDTH_JOINER: Final = "\u200d"
_EMOJI_SELECTOR: Final = "\ufe0f"  # makes a sign an emoji
_ESCAPED_BYTES: Final = range(
    0xDC80, 0xDD00
)  # a byte that is no UTF-8, as Python's "surrogateescape" writes it


def escape_invisible(text: str, mark_spaces: bool = False, keep: str = "") -> list[TextPiece]:
    """The pieces of a text, safe to show one by one, with the characters `kept` as they are.

    With `spaces` those that it begins with are dots.
    """
    if text.isascii() and text.isprintable() and not (mark_spaces and text.startswith(" ")):
        return [(text, False)] if text else []
    each = groupby(_escape_chars(text, mark_spaces, keep), key=lambda piece: piece[1])
    return [(join_pieces(same), stands) for stands, same in each]


def join_pieces(pieces: Iterable[TextPiece]) -> str:
    """The pieces as one string."""
    return "".join(one for one, _ in pieces)


def _escape_chars(text: str, spaces: bool, kept: str) -> Iterator[TextPiece]:
    """Each character as it is, or what is shown for it."""
    begun, marks, based = False, 0, False  # marks on the letter before, and whether there is one
    for at, one in enumerate(text):
        kind = unicodedata.category(one)
        if one == " ":
            yield (one, False) if begun or not spaces else (_VISIBLE_SPACE, True)
            marks, based = 0, False
            continue
        begun = True
        if kind[0] == "M" and one not in _BLANK_CHARS:
            marks += 1
            if marks > _MAX_MARKS:
                yield _code_point_label(one), True
            elif based:
                yield one, False
            else:
                yield _DOTTED_CIRCLE + one, True
            continue
        stands = _is_hidden(one, kind) and one not in kept and not _is_emoji_part(text, at)
        yield (_SYMBOLS.get(one) or _code_point_label(one), True) if stands else (one, False)
        marks, based = 0, not stands


def _is_hidden(one: str, kind: str) -> bool:
    return kind in _HIDDEN_CATEGORIES or one in _BLANK_CHARS


def _is_emoji_part(text: str, at: int) -> bool:
    """Whether the character belongs to an emoji that is all there."""
    if text[at] == _EMOJI_SELECTOR:
        return at > 0 and (_is_pictograph(text[at - 1]) or text[at - 1] in "0123456789#*")
    if text[at] != _ZERO_WIDTH_JOINER or not 0 < at < len(text) - 1:
        return False
    before = text[at - 2] if text[at - 1] == _EMOJI_SELECTOR and at > 1 else text[at - 1]
    return _is_pictograph(before) and _is_pictograph(text[at + 1])


def _is_pictograph(one: str) -> bool:
    """Whether it is a picture, or the colour of one's skin."""
    return (
        unicodedata.category(one) == "So" and one not in _BLANK_CHARS
    ) or "\U0001f3fb" <= one <= "\U0001f3ff"


def _code_point_label(one: str) -> str:
    number = ord(one)
    return f"‹{number - 0xDC00:02X}›" if number in _ESCAPED_BYTES else f"‹U+{number:04X}›"
