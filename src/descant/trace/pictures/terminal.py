"""Pictures of a trace as lines of text, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from descant.errors import InputError
from descant.trace.pictures.selection import PICTURES, TraceSelection
from descant.trace.pictures.terminal_beside import terminal_beside
from descant.trace.pictures.terminal_canvas import TerminalCanvas
from descant.trace.pictures.terminal_processors import terminal_processors
from descant.trace.pictures.terminal_speculation import terminal_speculation
from descant.trace.pictures.terminal_text import terminal_text
from descant.trace.pictures.terminal_tree import terminal_tree

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["TerminalCanvas", "render_terminal"]

_RENDERERS = {
    "tree": terminal_tree,
    "text": terminal_text,
    "processors": terminal_processors,
    "speculation": terminal_speculation,
}


def render_terminal(
    trace: Trace,
    picture: str,
    where: TraceSelection,
    beside: Trace | None = None,
    paper: TerminalCanvas | None = None,
) -> str:
    """One picture; "beside" is of two runs, the others of the first."""
    if paper is None:
        paper = TerminalCanvas()
    if picture == "beside":
        return terminal_beside(trace, where, beside, paper)
    if picture not in _RENDERERS:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _RENDERERS[picture](trace, where, paper)
