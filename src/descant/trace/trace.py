"""A trace: the record of a run, which can be saved, replayed without the model, and drawn."""

from __future__ import annotations

from typing import Any

from descant.trace.pictures.terminal import TerminalCanvas
from descant.trace.render import trace_html, trace_iframe, trace_svg, trace_text
from descant.trace.trace_data import TraceData

__all__ = ["Trace"]


class Trace(TraceData):
    """The records of a run, the header first, with what is derived from them and pictures of it."""

    def html(self, beside: TraceData | None = None, title: str | None = None) -> str:
        """All pictures as one self-contained HTML page, of this run or of two side by side."""
        return trace_html(self, beside, title)

    def svg(self, picture: str = "tree", *, beside: TraceData | None = None, **where: Any) -> str:
        """One picture as SVG: "tree", "text", "processors", "speculation" or "beside".

        `request`, `sequence` and `step` select what is drawn. Default: the first request, its best sequence,
        its last step.
        """
        return trace_svg(self, picture, beside, where)

    def text(
        self,
        picture: str = "tree",
        *,
        beside: TraceData | None = None,
        width: int = 80,
        colour: bool = False,
        **where: Any,
    ) -> str:
        """The same picture as lines of text; with `colour`, for a terminal that has colours."""
        return trace_text(self, picture, beside, TerminalCanvas(width, colour), where)

    def _repr_html_(self) -> str:
        return trace_iframe(self)
