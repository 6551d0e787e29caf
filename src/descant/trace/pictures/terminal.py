"""Pictures of a trace as lines of text, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from descant.errors import InputError
from descant.trace.pictures.selection import PICTURES, Where
from descant.trace.pictures.terminal_beside import terminal_beside
from descant.trace.pictures.terminal_canvas import Paper
from descant.trace.pictures.terminal_processors import terminal_processors
from descant.trace.pictures.terminal_speculation import terminal_speculation
from descant.trace.pictures.terminal_text import terminal_text
from descant.trace.pictures.terminal_tree import terminal_tree

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Paper", "terminal"]

_OF_ONE = {
    "tree": terminal_tree,
    "text": terminal_text,
    "processors": terminal_processors,
    "speculation": terminal_speculation,
}


def terminal(
    trace: Trace, picture: str, where: Where, beside: Trace | None = None, paper: Paper | None = None
) -> str:
    """One picture; "beside" is of two runs, the others of the first."""
    if paper is None:
        paper = Paper()
    if picture == "beside":
        return terminal_beside(trace, where, beside, paper)
    if picture not in _OF_ONE:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _OF_ONE[picture](trace, where, paper)
