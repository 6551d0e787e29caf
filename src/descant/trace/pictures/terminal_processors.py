"""One choice for a terminal: the effect of each processor, as bars before and after."""

from __future__ import annotations

from typing import Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_nats, format_percent, probability
from descant.trace.pictures.processor_view import ChoiceView, ProcessorPanel, last_choice
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import clip_pieces, fit_text, pieces_width
from descant.trace.records import TokenShift
from descant.trace.token_text import text_pieces, token_pieces
from descant.trace.trace_data import TraceData

__all__ = ["horizontal_bar", "terminal_processors"]

PERCENT_CELLS: Final = 9
TOKEN_CELLS: Final = 16  # at most
NUM_CONTEXT_TOKENS: Final = 10  # tokens shown before the choice
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def horizontal_bar(value: float, width: int) -> str:
    """A bar of `width` cells for the value 1; any positive value is visible."""
    eighths = round(min(max(value, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if value > 0 and width else eighths
    full_cells, rest = divmod(eighths, 8)
    return fit_text("█" * full_cells + (_EIGHTHS[rest] if rest else ""), width)


def terminal_processors(trace: TraceData, selection: TraceSelection, canvas: TerminalCanvas) -> str:
    """The last choice of a sequence up to the selected step."""
    assert selection.request is not None
    request, view = trace.requests[selection.request], last_choice(trace, selection)
    if view is None:
        return canvas.format_lines(
            [
                *canvas.wrap_text(request.method, "bold"),
                *canvas.wrap_text("what was chosen from was not kept"),
            ]
        )
    node, choice = view.node, view.node.choice
    assert choice is not None
    assert node.token is not None
    entropies = f"entropy {format_nats(choice.entropy)}, {format_nats(choice.left)} left to choose from"
    context = join_pieces(
        clip_pieces(text_pieces(trace, view.context_tokens[-NUM_CONTEXT_TOKENS:]), max(canvas.width - 2, 1))
    )
    rows: list[list[StyledText]] = [
        *canvas.wrap_text(request.method, "bold"),
        *canvas.wrap_text(f"step {node.step}, {entropies}"),
        [],
        [("… ", "dim"), (context, "dim")],
        [("→ ", "accent"), (join_pieces(token_pieces(trace, node.token, True)), "bold")],
    ]
    max_probability = max(
        [1e-9, *(probability(log) for panel in view.panels for one in panel.bars for log in one[1:])]
    )
    for panel in view.panels:
        rows += _panel_lines(trace, view, panel, max_probability, canvas.width)
    return canvas.format_lines(rows)


def _panel_lines(
    trace: TraceData, view: ChoiceView, panel: ProcessorPanel, max_probability: float, width: int
) -> list[list[StyledText]]:
    token_cells = min(TOKEN_CELLS, max(width // 4, 4))
    bar_cells = max((width - 2 - token_cells - 2 * PERCENT_CELLS - 2) // 2, 0)
    head = f"{'':{2 + token_cells}}{'before':>{PERCENT_CELLS}} {' ' * bar_cells}{'after':>{PERCENT_CELLS}}"
    rows: list[list[StyledText]] = [[], [(panel.name, "bold"), (f"  {panel.note}", "dim")], [(head, "dim")]]
    return rows + [
        _bar_line(trace, view, one, max_probability, (token_cells, bar_cells)) for one in panel.bars
    ]


def _bar_line(
    trace: TraceData, view: ChoiceView, shift: TokenShift, max_probability: float, sizes: tuple[int, int]
) -> list[StyledText]:
    token_cells, bar_cells = sizes
    taken, removed = (
        shift.token == view.node.token,
        probability(shift.after) == 0.0 < probability(shift.before),
    )
    pieces = clip_pieces(token_pieces(trace, shift.token, True), token_cells)
    after = "cut" if removed else format_percent(shift.after)
    return [
        ("→ " if taken else "  ", "accent"),
        (
            join_pieces(pieces) + " " * (token_cells - pieces_width(pieces)),
            "bold" if taken else "dim gone" if removed else "",
        ),
        (f"{format_percent(shift.before):>{PERCENT_CELLS}} ", ""),
        (horizontal_bar(probability(shift.before) / max_probability, bar_cells), "dim"),
        (f"{after:>{PERCENT_CELLS}} ", "bad" if removed else ""),
        ("" if removed else horizontal_bar(probability(shift.after) / max_probability, bar_cells), "accent"),
    ]
