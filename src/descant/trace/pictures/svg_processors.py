"""One choice as SVG: the effect of each processor, as bars before and after."""

from __future__ import annotations

from typing import Final

from descant.trace.pictures.node_labels import ending_label, token_label
from descant.trace.pictures.number_format import format_nats, probability
from descant.trace.pictures.processor_view import ChoiceView, ProcessorPanel, format_shift, last_choice
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg_elements import (
    CELL_WIDTH,
    box,
    caption,
    line,
    svg_document,
    text,
    titled_group,
)
from descant.trace.pictures.svg_text import MARGIN, draw_heading
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.records import TokenShift
from descant.trace.token_text import text_pieces, token_pieces
from descant.trace.trace_data import TraceData

__all__ = ["svg_processors"]

WIDTH: Final = 708.0
TOKEN_CELLS: Final = 16  # width of a token
FIGURES_WIDTH: Final = 130.0
ROW_PITCH: Final = 23.0
NUM_CONTEXT_TOKENS: Final = 10  # tokens shown before the choice


def svg_processors(trace: TraceData, selection: TraceSelection) -> str:
    """The last choice of a sequence up to the selected step."""
    assert selection.request is not None
    request, view = trace.requests[selection.request], last_choice(trace, selection)
    if view is None:
        description = "what was chosen from was not kept"
        return svg_document(
            draw_heading(request.method, [description]),
            420,
            72,
            f"Processors of {request.method}",
            description,
        )
    node, choice = view.node, view.node.choice
    assert choice is not None
    assert node.token is not None
    body = draw_heading(
        request.method,
        [
            f"step {node.step}",
            f"entropy {format_nats(choice.entropy)}",
            f"{format_nats(choice.left)} left to choose from",
        ],
    )
    context = clip_pieces(text_pieces(trace, view.context_tokens[-NUM_CONTEXT_TOKENS:]), 60)
    body += [
        text([("… ", True), *context], MARGIN, 78, "quiet"),
        text([("→ ", True), *token_pieces(trace, node.token, True)], MARGIN, 98, "ink bold"),
    ]
    y = 128.0
    max_probability = max(
        [1e-9, *(probability(log) for panel in view.panels for one in panel.bars for log in one[1:])]
    )
    for panel in view.panels:
        y = _draw_panel(trace, view, panel, y, max_probability, body)
    body += [
        box(MARGIN, y - 8, 22, 6, "bar", rx=2),
        caption("before", MARGIN + 28, y - 1),
        box(MARGIN + 84, y - 8, 22, 6, "accent", rx=2),
        caption("after", MARGIN + 112, y - 1),
        caption("→ taken", MARGIN + 160, y - 1),
    ]
    notes = "; ".join(f"{one.name}: {one.note}" for one in view.panels)
    ending = ending_label(node)
    description = f"{notes}. Taken: {token_label(trace, node.token)}{', ' * bool(ending)}{ending}"
    return svg_document(body, WIDTH, y + 18, f"Processors of {request.method}, step {node.step}", description)


def _draw_panel(
    trace: TraceData,
    view: ChoiceView,
    panel: ProcessorPanel,
    y: float,
    max_probability: float,
    body: list[str],
) -> float:
    """Draw the bars of one processor; returns the y of the next panel."""
    body += [text(panel.name, MARGIN, y, "s bold ink"), caption(panel.note, WIDTH - MARGIN, y, anchor="end")]
    body.append(line(MARGIN, y + 8, WIDTH - MARGIN, y + 8, "frame"))
    y += 16
    for bar in panel.bars:
        body.append(_draw_bar(trace, view, bar, y, max_probability))
        y += ROW_PITCH
    return y + 26


def _draw_bar(trace: TraceData, view: ChoiceView, bar: TokenShift, y: float, max_probability: float) -> str:
    left = MARGIN + 16 + TOKEN_CELLS * CELL_WIDTH
    max_width = WIDTH - MARGIN - FIGURES_WIDTH - left
    before, after = (max_width * probability(log) / max_probability for log in (bar.before, bar.after))
    taken, removed = bar.token == view.node.token, probability(bar.after) == 0.0 < probability(bar.before)
    weight = "gone faint" if removed else "ink bold" if taken else "ink"
    pieces = clip_pieces(token_pieces(trace, bar.token, True), TOKEN_CELLS)
    parts = [
        text("→", MARGIN, y + 14, "accent bold") if taken else "",
        text(pieces, MARGIN + 14, y + 14, weight),
        box(left, y + 2, max(before, 1), 8, "bar", rx=2),
        "" if removed else box(left, y + 11, max(after, 1), 8, "accent", rx=2),
        text(format_shift(bar), WIDTH - MARGIN, y + 14, "small bad" if removed else "small quiet", "end"),
    ]
    title = f"{token_label(trace, bar.token)}  {format_shift(bar)}{'  cut' if removed else ''}"
    return titled_group(
        title, *parts, data_token=bar.token, data_before=repr(bar.before), data_after=repr(bar.after)
    )
