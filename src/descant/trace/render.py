"""Pictures of a trace: an HTML page, SVG, text for a terminal."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from descant.errors import InputError
from descant.trace.pictures.page import render_page
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg import render_svg
from descant.trace.pictures.terminal import TerminalCanvas, render_terminal
from descant.trace.trace_data import TraceData

__all__ = ["trace_html", "trace_iframe", "trace_svg", "trace_text"]


def trace_html(trace: TraceData, beside: TraceData | None = None, title: str | None = None) -> str:
    """All pictures as one self-contained HTML page, of one run or of two side by side."""
    return render_page(trace, beside, title)


def trace_svg(trace: TraceData, picture: str, beside: TraceData | None, selection: Mapping[str, Any]) -> str:
    """One picture as SVG."""
    return render_svg(trace, picture, _parse_selection(selection).resolve(trace), beside)


def trace_text(
    trace: TraceData,
    picture: str,
    beside: TraceData | None,
    canvas: TerminalCanvas,
    selection: Mapping[str, Any],
) -> str:
    """One picture as lines of text."""
    text = render_terminal(trace, picture, _parse_selection(selection).resolve(trace), beside, canvas)
    return text.removesuffix("\n")


def trace_iframe(trace: TraceData) -> str:
    """The HTML page in an iframe, so that the styles of a notebook and of the page do not mix."""
    source = html.escape(trace_html(trace), quote=True)
    return (
        f'<iframe title="Trace of a run" sandbox="allow-scripts" srcdoc="{source}" '
        'style="width:100%;height:640px;border:0"></iframe>'
    )


def _parse_selection(arguments: Mapping[str, Any]) -> TraceSelection:
    """The selection that keyword arguments name."""
    for name, value in arguments.items():
        if name not in ("request", "sequence", "step"):
            raise InputError(name, "must be one of `request`, `sequence` and `step`", value, "leave it out")
        if type(value) is not int and not (value is None and name != "sequence"):
            raise InputError(name, "must be an int", value)
    return TraceSelection(**arguments)
