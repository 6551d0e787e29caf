"""The pictures of a trace, each drawn once, on the canvas of an SVG file or of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from descant.errors import InputError
from descant.tokenization.display import join_pieces
from descant.trace.pictures.cells import format_nats
from descant.trace.pictures.svg import SvgCanvas, svg_tree
from descant.trace.pictures.terminal import TerminalCanvas, terminal_tree
from descant.trace.pictures.text import MAX_DRAWN_TOKENS, text_stats
from descant.trace.pictures.views import (
    RunComparison,
    compare_runs,
    draft_position_stats,
    draft_summary,
    ending_label,
    forward_passes,
    last_choice,
    token_label,
)
from descant.trace.trace_data import PICTURES, Node, TraceData, TraceSelection, text_pieces

Canvas = SvgCanvas | TerminalCanvas
Titles = tuple[str, str]  # title, and description for screen readers


def render_svg(selection: TraceSelection, picture: str, beside: TraceData | None = None) -> str:
    """One picture as a self-contained SVG file; "beside" shows two runs, the others the first."""
    if picture == "tree":
        return svg_tree(selection)
    canvas = SvgCanvas()
    return canvas.document(*_draw(canvas, selection, picture, beside))


def render_terminal(
    selection: TraceSelection,
    picture: str,
    beside: TraceData | None = None,
    width: int = 80,
    colour: bool = False,
) -> str:
    """One picture as lines of text for a terminal; "beside" shows two runs, the others the first."""
    canvas = TerminalCanvas(width, colour)
    if picture == "tree":
        terminal_tree(selection, canvas)
    else:
        _draw(canvas, selection, picture, beside)
    return canvas.lines()


def _draw(canvas: Canvas, selection: TraceSelection, picture: str, beside: TraceData | None) -> Titles:
    if picture == "beside":
        return _draw_comparison(canvas, compare_runs(selection, beside))
    if picture not in _PICTURES:
        raise InputError("picture", f"must be one of {', '.join(PICTURES)}", picture)
    return _PICTURES[picture](canvas, selection)


def _draw_text(canvas: Canvas, selection: TraceSelection) -> Titles:
    """The text of one sequence, after the end of its prompt."""
    trace, method, nodes = selection.trace, selection.request.method, selection.path
    canvas.heading(method, text_stats(selection, nodes))
    canvas.shaded_text(selection)
    return f"Text of {method}", _text_of(trace, nodes[-MAX_DRAWN_TOKENS:])


def _draw_choice(canvas: Canvas, selection: TraceSelection) -> Titles:
    """The last choice of a sequence up to the selected step."""
    method, view = selection.request.method, last_choice(selection)
    if view is None:
        missing = "what was chosen from was not kept"
        canvas.heading(method, [missing])
        return f"Processors of {method}", missing
    before, left = format_nats(view.choice.entropy), format_nats(view.choice.left)
    canvas.heading(method, [f"step {view.node.step}", f"entropy {before}", f"{left} left to choose from"])
    canvas.choice(view)
    notes = "; ".join(f"{panel.name}: {panel.note}" for panel in view.panels)
    taken = ", ".join(filter(None, (token_label(selection.trace, view.token), ending_label(view.node))))
    return f"Processors of {method}, step {view.node.step}", f"{notes}. Taken: {taken}"


def _draw_drafts(canvas: Canvas, selection: TraceSelection) -> Titles:
    """The drafts along one sequence."""
    request, passes = selection.request, forward_passes(selection)
    summary = draft_summary(passes)
    drafter = [] if request.drafter is None else [f"guessed by {request.drafter}"]
    canvas.heading(request.method, [*summary, *drafter])
    nodes = [node for forward in passes for node in forward.nodes][-MAX_DRAWN_TOKENS:]
    notes = {forward.nodes[-1].number: forward for forward in passes if forward.rejected_drafts}
    canvas.drafted_text(selection.trace, nodes, notes)
    canvas.draft_chart(draft_position_stats(passes))
    return f"Guesses of {request.method}", ", ".join(summary)


def _draw_comparison(canvas: Canvas, comparison: RunComparison) -> Titles:
    """Two texts, their different settings and their results."""
    divergence = comparison.divergence_text()
    canvas.heading("Two runs side by side", [divergence])
    canvas.compared_texts(comparison)
    canvas.table("set otherwise", comparison.settings)
    canvas.table("what came of it", comparison.results)
    texts = (f"{run.name}: {_text_of(run.trace, run.nodes[:MAX_DRAWN_TOKENS])}" for run in comparison.runs)
    return "Two runs side by side", f"{divergence}. {' '.join(texts)}"


def _text_of(trace: TraceData, nodes: Sequence[Node]) -> str:
    return join_pieces(text_pieces(trace, [node.token for node in nodes if node.token is not None]))


_PICTURES: Final[dict[str, Callable[[Canvas, TraceSelection], Titles]]] = {
    "text": _draw_text,
    "processors": _draw_choice,
    "speculation": _draw_drafts,
}
