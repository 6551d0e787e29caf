"""One choice for a terminal: what each processor made of it, as bars before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import join_pieces
from descant.trace.pictures.number_format import format_nats, format_percent, probability
from descant.trace.pictures.processor_view import ChoiceView, ProcessorPanel, last_choice
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import clip_pieces, fit_text, pieces_width
from descant.trace.records import TokenShift
from descant.trace.token_text import text_pieces, token_pieces

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["horizontal_bar", "terminal_processors"]

PERCENT_CELLS: Final = 9  # cells of a percentage
TOKEN_CELLS: Final = 16  # cells of a token, where there is room
NUM_CONTEXT_TOKENS: Final = 10  # tokens before the choice that are shown
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def horizontal_bar(value: float, width: int) -> str:
    """A bar of so many cells where the value is 1; one that is more than nothing is to be seen."""
    eighths = round(min(max(value, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if value > 0 and width else eighths
    whole, rest = divmod(eighths, 8)
    return fit_text("█" * whole + (_EIGHTHS[rest] if rest else ""), width)


def terminal_processors(trace: Trace, where: TraceSelection, paper: TerminalCanvas) -> str:
    """The last choice of a sequence in a step."""
    assert where.request is not None
    asked, found = trace.requests[where.request], last_choice(trace, where)
    if found is None:
        return paper.format_lines(
            [*paper.wrap_text(asked.method, "bold"), *paper.wrap_text("what was chosen from was not kept")]
        )
    node, look = found.node, found.node.choice
    assert look is not None
    assert node.token is not None
    said = (
        f"step {node.step}, entropy {format_nats(look.entropy)}, {format_nats(look.left)} left to choose from"
    )
    before = join_pieces(
        clip_pieces(text_pieces(trace, found.context_tokens[-NUM_CONTEXT_TOKENS:]), max(paper.width - 2, 1))
    )
    rows: list[list[StyledText]] = [
        *paper.wrap_text(asked.method, "bold"),
        *paper.wrap_text(said),
        [],
        [("… ", "dim"), (before, "dim")],
        [("→ ", "accent"), (join_pieces(token_pieces(trace, node.token, True)), "bold")],
    ]
    most = max([1e-9, *(probability(log) for panel in found.panels for one in panel.bars for log in one[1:])])
    for panel in found.panels:
        rows += _panel_lines(trace, found, panel, most, paper.width)
    return paper.format_lines(rows)


def _panel_lines(
    trace: Trace, found: ChoiceView, panel: ProcessorPanel, most: float, width: int
) -> list[list[StyledText]]:
    letters = min(TOKEN_CELLS, max(width // 4, 4))
    room = max((width - 2 - letters - 2 * PERCENT_CELLS - 2) // 2, 0)
    head = f"{'':{2 + letters}}{'before':>{PERCENT_CELLS}} {fit_text('', room)}{'after':>{PERCENT_CELLS}}"
    rows: list[list[StyledText]] = [[], [(panel.name, "bold"), (f"  {panel.note}", "dim")], [(head, "dim")]]
    return rows + [_bar_line(trace, found, one, most, (letters, room)) for one in panel.bars]


def _bar_line(
    trace: Trace, found: ChoiceView, one: TokenShift, most: float, sizes: tuple[int, int]
) -> list[StyledText]:
    letters, room = sizes
    taken, gone = one.token == found.node.token, probability(one.after) == 0.0 < probability(one.before)
    kept = clip_pieces(token_pieces(trace, one.token, True), letters)
    after = "cut" if gone else format_percent(one.after)
    return [
        ("→ " if taken else "  ", "accent"),
        (
            join_pieces(kept) + " " * (letters - pieces_width(kept)),
            "bold" if taken else "dim gone" if gone else "",
        ),
        (f"{format_percent(one.before):>{PERCENT_CELLS}} ", ""),
        (horizontal_bar(probability(one.before) / most, room), "dim"),
        (f"{after:>{PERCENT_CELLS}} ", "bad" if gone else ""),
        ("" if gone else horizontal_bar(probability(one.after) / most, room), "accent"),
    ]
