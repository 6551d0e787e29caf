"""Pictures of a trace as self-contained SVG files."""

from __future__ import annotations

from descant.errors import InputError
from descant.trace.pictures.selection import PICTURES, TraceSelection
from descant.trace.pictures.svg_beside import svg_beside
from descant.trace.pictures.svg_processors import svg_processors
from descant.trace.pictures.svg_speculation import svg_speculation
from descant.trace.pictures.svg_text import svg_text
from descant.trace.pictures.svg_tree import svg_tree
from descant.trace.trace_data import TraceData

__all__ = ["render_svg"]

_RENDERERS = {
    "tree": svg_tree,
    "text": svg_text,
    "processors": svg_processors,
    "speculation": svg_speculation,
}


def render_svg(
    trace: TraceData, picture: str, selection: TraceSelection, beside: TraceData | None = None
) -> str:
    """Draw one picture; "beside" shows two runs, the others the first."""
    if picture == "beside":
        return svg_beside(trace, selection, beside)
    if picture not in _RENDERERS:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _RENDERERS[picture](trace, selection)
