"""Texts as a picture shows them: everything that cannot be seen, or that would be obeyed, is spelt out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

__all__ = ["Piece", "plain", "shown"]

Piece = tuple[str, bool]  # what is shown, and whether it stands for something else

_NAMED: Final = {"\n": "↵", "\t": "⇥"}
_SPACE: Final = "·"
_BASE: Final = "◌"  # what a mark that has no letter is shown on
_MARKS: Final = 3  # on one letter; no language needs more, and a heap of them hides the lines above
_HIDDEN: Final = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
# Letters, marks and signs by their category, and yet nothing is to be seen: Unicode's "default ignorable"
# that are in no hidden category, and the blank of Braille.
_BLANK: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_JOINER: Final = "\u200d"
_PICTURED: Final = "\ufe0f"  # makes a sign an emoji
_BYTES: Final = range(0xDC80, 0xDD00)  # a byte that is no UTF-8, as Python's "surrogateescape" writes it


def shown(text: str, spaces: bool = False, kept: str = "") -> list[Piece]:
    """The pieces of a text, safe to show one by one, with the characters `kept` as they are.

    With `spaces` those that it begins with are dots.
    """
    if text.isascii() and text.isprintable() and not (spaces and text.startswith(" ")):
        return [(text, False)] if text else []
    each = groupby(_spelt(text, spaces, kept), key=lambda piece: piece[1])
    return [(plain(same), stands) for stands, same in each]


def plain(pieces: Iterable[Piece]) -> str:
    """The pieces as one string."""
    return "".join(one for one, _ in pieces)


def _spelt(text: str, spaces: bool, kept: str) -> Iterator[Piece]:
    """Each character as it is, or what is shown for it."""
    begun, marks, based = False, 0, False  # marks on the letter before, and whether there is one
    for at, one in enumerate(text):
        kind = unicodedata.category(one)
        if one == " ":
            yield (one, False) if begun or not spaces else (_SPACE, True)
            marks, based = 0, False
            continue
        begun = True
        if kind[0] == "M" and one not in _BLANK:
            marks += 1
            if marks > _MARKS:
                yield _code(one), True
            elif based:
                yield one, False
            else:
                yield _BASE + one, True
            continue
        stands = _hidden(one, kind) and one not in kept and not _emoji(text, at)
        yield (_NAMED.get(one) or _code(one), True) if stands else (one, False)
        marks, based = 0, not stands


def _hidden(one: str, kind: str) -> bool:
    return kind in _HIDDEN or one in _BLANK


def _emoji(text: str, at: int) -> bool:
    """Whether the character belongs to an emoji that is all there."""
    if text[at] == _PICTURED:
        return at > 0 and (_sign(text[at - 1]) or text[at - 1] in "0123456789#*")
    if text[at] != _JOINER or not 0 < at < len(text) - 1:
        return False
    before = text[at - 2] if text[at - 1] == _PICTURED and at > 1 else text[at - 1]
    return _sign(before) and _sign(text[at + 1])


def _sign(one: str) -> bool:
    """Whether it is a picture, or the colour of one's skin."""
    return (unicodedata.category(one) == "So" and one not in _BLANK) or "\U0001f3fb" <= one <= "\U0001f3ff"


def _code(one: str) -> str:
    number = ord(one)
    return f"‹{number - 0xDC00:02X}›" if number in _BYTES else f"‹U+{number:04X}›"
