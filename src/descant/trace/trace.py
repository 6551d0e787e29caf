"""A trace: the record of a run, which can be saved, replayed without the model, and drawn."""

from __future__ import annotations

import html
from typing import Any

from descant.trace.pictures.drawing import render_svg, render_terminal
from descant.trace.pictures.page import render_page
from descant.trace.trace_data import TraceData, TraceSelection


class Trace(TraceData):
    """The records of a run, the header first, with what is derived from them and pictures of it."""

    def html(self, beside: TraceData | None = None, title: str | None = None) -> str:
        """All pictures as one self-contained HTML page, of this run or of two side by side."""
        return render_page(self, beside, title)

    def svg(self, picture: str = "tree", *, beside: TraceData | None = None, **where: Any) -> str:
        """One picture as SVG: "tree", "text", "processors", "speculation" or "beside".

        `request`, `sequence` and `step` select what is drawn. Default: the first request, its best sequence,
        its last step.
        """
        return render_svg(TraceSelection.of(self, **where), picture, beside)

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
        return render_terminal(TraceSelection.of(self, **where), picture, beside, width, colour)

    def _repr_html_(self) -> str:
        """The page in an iframe, so that the styles of a notebook and of the page do not mix."""
        source = html.escape(self.html(), quote=True)
        return (
            f'<iframe title="Trace of a run" sandbox="allow-scripts" srcdoc="{source}" '
            'style="width:100%;height:640px;border:0"></iframe>'
        )
