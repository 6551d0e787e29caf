"""Tokens as a picture shows them, by what a trace says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from descant.tokenization.display import Piece, plain, shown

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["phrase", "word"]


def word(trace: Trace, token: int, spaces: bool = False) -> list[Piece]:
    """A token: its text, the name of a special one, or its number where the trace has neither."""
    text = trace.texts.get(token, "")
    if not text:
        return [(f"‹{token}›", True)]
    pieces = shown(text, spaces)
    return [(plain(pieces), True)] if token in trace.special else pieces


def phrase(trace: Trace, tokens: Iterable[int], spaces: bool = False) -> list[Piece]:
    """Tokens in a row; a character whose bytes they share is whole."""
    pieces: list[Piece] = []
    gathered: list[str] = []
    for token in tokens:
        text = trace.texts.get(token, "")
        if text and token not in trace.special:
            gathered.append(text)
            continue
        pieces += shown(_whole(gathered), spaces and not pieces) + word(trace, token)
        gathered = []
    return pieces + shown(_whole(gathered), spaces and not pieces)


def _whole(texts: Sequence[str]) -> str:
    """Texts put together, bytes that make a character together as that."""
    joined = "".join(texts)
    try:
        return joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that is no byte, which only a file made by hand has
        return joined
