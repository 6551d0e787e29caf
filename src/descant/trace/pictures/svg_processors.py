"""One choice as SVG: what each processor made of it, as bars before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_processors"]

WIDTH: Final = 708.0
TOKEN_CELLS: Final = 16  # cells of a token
FIGURES_WIDTH: Final = 130.0  # width of the figures
ROW_PITCH: Final = 23.0  # from token to token
NUM_CONTEXT_TOKENS: Final = 10  # tokens before the choice that are shown


def svg_processors(trace: Trace, where: TraceSelection) -> str:
    """The last choice of a sequence in a step."""
    assert where.request is not None
    asked, found = trace.requests[where.request], last_choice(trace, where)
    if found is None:
        said = "what was chosen from was not kept"
        return svg_document(
            draw_heading(asked.method, [said]), 420, 72, f"Processors of {asked.method}", said
        )
    node, look = found.node, found.node.choice
    assert look is not None
    assert node.token is not None
    body = draw_heading(
        asked.method,
        [
            f"step {node.step}",
            f"entropy {format_nats(look.entropy)}",
            f"{format_nats(look.left)} left to choose from",
        ],
    )
    context = clip_pieces(text_pieces(trace, found.context_tokens[-NUM_CONTEXT_TOKENS:]), 60)
    body += [
        text([("… ", True), *context], MARGIN, 78, "quiet"),
        text([("→ ", True), *token_pieces(trace, node.token, True)], MARGIN, 98, "ink bold"),
    ]
    y = 128.0
    most = max([1e-9, *(probability(log) for panel in found.panels for one in panel.bars for log in one[1:])])
    for panel in found.panels:
        y = _draw_panel(trace, found, panel, y, most, body)
    body += [
        box(MARGIN, y - 8, 22, 6, "bar", rx=2),
        caption("before", MARGIN + 28, y - 1),
        box(MARGIN + 84, y - 8, 22, 6, "accent", rx=2),
        caption("after", MARGIN + 112, y - 1),
        caption("→ taken", MARGIN + 160, y - 1),
    ]
    told = "; ".join(f"{one.name}: {one.note}" for one in found.panels)
    said = f"{told}. Taken: {token_label(trace, node.token)}{', ' * bool(ending_label(node))}{ending_label(node)}"
    return svg_document(body, WIDTH, y + 18, f"Processors of {asked.method}, step {node.step}", said)


def _draw_panel(
    trace: Trace, found: ChoiceView, panel: ProcessorPanel, y: float, most: float, body: list[str]
) -> float:
    """One processor's bars; where the next begins."""
    body += [text(panel.name, MARGIN, y, "s bold ink"), caption(panel.note, WIDTH - MARGIN, y, anchor="end")]
    body.append(line(MARGIN, y + 8, WIDTH - MARGIN, y + 8, "frame"))
    y += 16
    for bar in panel.bars:
        body.append(_draw_bar(trace, found, bar, y, most))
        y += ROW_PITCH
    return y + 26


def _draw_bar(trace: Trace, found: ChoiceView, bar: TokenShift, y: float, most: float) -> str:
    left = MARGIN + 16 + TOKEN_CELLS * CELL_WIDTH
    room = WIDTH - MARGIN - FIGURES_WIDTH - left
    before, after = (room * probability(log) / most for log in (bar.before, bar.after))
    taken, gone = bar.token == found.node.token, probability(bar.after) == 0.0 < probability(bar.before)
    weight = "gone faint" if gone else "ink bold" if taken else "ink"
    pieces = clip_pieces(token_pieces(trace, bar.token, True), TOKEN_CELLS)
    parts = [
        text("→", MARGIN, y + 14, "accent bold") if taken else "",
        text(pieces, MARGIN + 14, y + 14, weight),
        box(left, y + 2, max(before, 1), 8, "bar", rx=2),
        "" if gone else box(left, y + 11, max(after, 1), 8, "accent", rx=2),
        text(format_shift(bar), WIDTH - MARGIN, y + 14, "small bad" if gone else "small quiet", "end"),
    ]
    title = f"{token_label(trace, bar.token)}  {format_shift(bar)}{'  cut' if gone else ''}"
    return titled_group(
        title, *parts, data_token=bar.token, data_before=repr(bar.before), data_after=repr(bar.after)
    )
