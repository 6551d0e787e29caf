"""Pictures of a trace as SVG, each a file that needs nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from descant.errors import InputError
from descant.trace.pictures.selection import PICTURES, TraceSelection
from descant.trace.pictures.svg_beside import svg_beside
from descant.trace.pictures.svg_processors import svg_processors
from descant.trace.pictures.svg_speculation import svg_speculation
from descant.trace.pictures.svg_text import svg_text
from descant.trace.pictures.svg_tree import svg_tree

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["render_svg"]

_RENDERERS = {
    "tree": svg_tree,
    "text": svg_text,
    "processors": svg_processors,
    "speculation": svg_speculation,
}


def render_svg(trace: Trace, picture: str, where: TraceSelection, beside: Trace | None = None) -> str:
    """One picture; "beside" is of two runs, the others of the first."""
    if picture == "beside":
        return svg_beside(trace, where, beside)
    if picture not in _RENDERERS:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _RENDERERS[picture](trace, where)
