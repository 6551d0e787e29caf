"""Tokens as a picture shows them, by what a trace says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["text_pieces", "token_pieces"]


def token_pieces(trace: Trace, token: int, mark_spaces: bool = False) -> list[TextPiece]:
    """A token: its text, the name of a special one, or its number where the trace has neither."""
    text = trace.texts.get(token, "")
    if not text:
        return [(f"‹{token}›", True)]
    pieces = escape_invisible(text, mark_spaces)
    return [(join_pieces(pieces), True)] if token in trace.special_tokens else pieces


def text_pieces(trace: Trace, tokens: Iterable[int], mark_spaces: bool = False) -> list[TextPiece]:
    """Tokens in a row; a character whose bytes they share is whole."""
    pieces: list[TextPiece] = []
    gathered: list[str] = []
    for token in tokens:
        text = trace.texts.get(token, "")
        if text and token not in trace.special_tokens:
            gathered.append(text)
            continue
        pieces += escape_invisible(_join_texts(gathered), mark_spaces and not pieces) + token_pieces(
            trace, token
        )
        gathered = []
    return pieces + escape_invisible(_join_texts(gathered), mark_spaces and not pieces)


def _join_texts(texts: Sequence[str]) -> str:
    """Texts put together, bytes that make a character together as that."""
    joined = "".join(texts)
    try:
        return joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that is no byte, which only a file made by hand has
        return joined
