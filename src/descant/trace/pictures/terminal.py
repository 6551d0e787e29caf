"""Pictures of a trace as text for a terminal."""

from __future__ import annotations

from descant.errors import InputError
from descant.trace.pictures.selection import PICTURES, TraceSelection
from descant.trace.pictures.terminal_beside import terminal_beside
from descant.trace.pictures.terminal_canvas import TerminalCanvas
from descant.trace.pictures.terminal_processors import terminal_processors
from descant.trace.pictures.terminal_speculation import terminal_speculation
from descant.trace.pictures.terminal_text import terminal_text
from descant.trace.pictures.terminal_tree import terminal_tree
from descant.trace.trace_data import TraceData

__all__ = ["TerminalCanvas", "render_terminal"]

_RENDERERS = {
    "tree": terminal_tree,
    "text": terminal_text,
    "processors": terminal_processors,
    "speculation": terminal_speculation,
}


def render_terminal(
    trace: TraceData,
    picture: str,
    selection: TraceSelection,
    beside: TraceData | None = None,
    canvas: TerminalCanvas | None = None,
) -> str:
    """Draw one picture; "beside" shows two runs, the others the first."""
    if canvas is None:
        canvas = TerminalCanvas()
    if picture == "beside":
        return terminal_beside(trace, selection, beside, canvas)
    if picture not in _RENDERERS:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _RENDERERS[picture](trace, selection, canvas)
