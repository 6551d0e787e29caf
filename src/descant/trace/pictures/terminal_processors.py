"""One choice for a terminal: what each processor made of it, as bars before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.tokenization.display import plain
from descant.trace.pictures.figures import nats, percent, share
from descant.trace.pictures.processor_view import Choice, Panel, choice
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_canvas import Paper, Span
from descant.trace.pictures.terminal_cells import clipped, fitted, width_of
from descant.trace.records import Moved
from descant.trace.token_text import phrase, word

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["bar", "terminal_processors"]

FIGURE: Final = 9  # cells of a percentage
WORD: Final = 16  # cells of a token, where there is room
BEHIND: Final = 10  # tokens before the choice that are shown
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def bar(value: float, width: int) -> str:
    """A bar of so many cells where the value is 1; one that is more than nothing is to be seen."""
    eighths = round(min(max(value, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if value > 0 and width else eighths
    whole, rest = divmod(eighths, 8)
    return fitted("█" * whole + (_EIGHTHS[rest] if rest else ""), width)


def terminal_processors(trace: Trace, where: Where, paper: Paper) -> str:
    """The last choice of a sequence in a step."""
    assert where.request is not None
    asked, found = trace.requests[where.request], choice(trace, where)
    if found is None:
        return paper.lines(
            [*paper.told(asked.method, "bold"), *paper.told("what was chosen from was not kept")]
        )
    node, look = found.node, found.node.look
    assert look is not None
    assert node.token is not None
    said = f"step {node.born}, entropy {nats(look.entropy)}, {nats(look.left)} left to choose from"
    before = plain(clipped(phrase(trace, found.before[-BEHIND:]), max(paper.width - 2, 1)))
    rows: list[list[Span]] = [
        *paper.told(asked.method, "bold"),
        *paper.told(said),
        [],
        [("… ", "dim"), (before, "dim")],
        [("→ ", "accent"), (plain(word(trace, node.token, True)), "bold")],
    ]
    most = max([1e-9, *(share(log) for panel in found.panels for one in panel.bars for log in one[1:])])
    for panel in found.panels:
        rows += _panel(trace, found, panel, most, paper.width)
    return paper.lines(rows)


def _panel(trace: Trace, found: Choice, panel: Panel, most: float, width: int) -> list[list[Span]]:
    letters = min(WORD, max(width // 4, 4))
    room = max((width - 2 - letters - 2 * FIGURE - 2) // 2, 0)
    head = f"{'':{2 + letters}}{'before':>{FIGURE}} {fitted('', room)}{'after':>{FIGURE}}"
    rows: list[list[Span]] = [[], [(panel.name, "bold"), (f"  {panel.note}", "dim")], [(head, "dim")]]
    return rows + [_bars(trace, found, one, most, (letters, room)) for one in panel.bars]


def _bars(trace: Trace, found: Choice, one: Moved, most: float, sizes: tuple[int, int]) -> list[Span]:
    letters, room = sizes
    taken, gone = one.token == found.node.token, share(one.after) == 0.0 < share(one.before)
    kept = clipped(word(trace, one.token, True), letters)
    after = "cut" if gone else percent(one.after)
    return [
        ("→ " if taken else "  ", "accent"),
        (plain(kept) + " " * (letters - width_of(kept)), "bold" if taken else "dim gone" if gone else ""),
        (f"{percent(one.before):>{FIGURE}} ", ""),
        (bar(share(one.before) / most, room), "dim"),
        (f"{after:>{FIGURE}} ", "bad" if gone else ""),
        ("" if gone else bar(share(one.after) / most, room), "accent"),
    ]
