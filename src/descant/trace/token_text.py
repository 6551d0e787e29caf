"""Display text of a trace's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.trace_data import TraceData

__all__ = ["text_pieces", "token_pieces"]


def token_pieces(trace: TraceData, token: int, mark_spaces: bool = False) -> list[TextPiece]:
    """A token as its text, as the name of a special token, or as its id if the trace has neither."""
    text = trace.texts.get(token, "")
    if not text:
        return [(f"‹{token}›", True)]
    pieces = escape_invisible(text, mark_spaces)
    return [(join_pieces(pieces), True)] if token in trace.special_tokens else pieces


def text_pieces(trace: TraceData, tokens: Iterable[int], mark_spaces: bool = False) -> list[TextPiece]:
    """The text of several tokens; a character split over tokens is joined."""
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
    """Texts joined, with bytes that form a character decoded together."""
    joined = "".join(texts)
    try:
        return joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that encodes no byte: only in a file written by hand
        return joined
