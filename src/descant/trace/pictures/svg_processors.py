"""One choice as SVG: what each processor made of it, as bars before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from descant.trace.pictures.drawing import CELL, box, caption, document, line, text, titled
from descant.trace.pictures.figures import nats, share
from descant.trace.pictures.legend import ending, named
from descant.trace.pictures.processor_view import Choice, Panel, change, choice
from descant.trace.pictures.selection import Where
from descant.trace.pictures.svg_text import MARGIN, heading
from descant.trace.pictures.terminal_cells import clipped
from descant.trace.records import Moved
from descant.trace.token_text import phrase, word

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_processors"]

WIDTH: Final = 708.0
WORD: Final = 16  # cells of a token
SAID: Final = 130.0  # width of the figures
PITCH: Final = 23.0  # from token to token
BEHIND: Final = 10  # tokens before the choice that are shown


def svg_processors(trace: Trace, where: Where) -> str:
    """The last choice of a sequence in a step."""
    assert where.request is not None
    asked, found = trace.requests[where.request], choice(trace, where)
    if found is None:
        said = "what was chosen from was not kept"
        return document(heading(asked.method, [said]), 420, 72, f"Processors of {asked.method}", said)
    node, look = found.node, found.node.look
    assert look is not None
    assert node.token is not None
    body = heading(
        asked.method,
        [f"step {node.born}", f"entropy {nats(look.entropy)}", f"{nats(look.left)} left to choose from"],
    )
    context = clipped(phrase(trace, found.before[-BEHIND:]), 60)
    body += [
        text([("… ", True), *context], MARGIN, 78, "quiet"),
        text([("→ ", True), *word(trace, node.token, True)], MARGIN, 98, "ink bold"),
    ]
    y = 128.0
    most = max([1e-9, *(share(log) for panel in found.panels for one in panel.bars for log in one[1:])])
    for panel in found.panels:
        y = _panel(trace, found, panel, y, most, body)
    body += [
        box(MARGIN, y - 8, 22, 6, "bar", rx=2),
        caption("before", MARGIN + 28, y - 1),
        box(MARGIN + 84, y - 8, 22, 6, "accent", rx=2),
        caption("after", MARGIN + 112, y - 1),
        caption("→ taken", MARGIN + 160, y - 1),
    ]
    told = "; ".join(f"{one.name}: {one.note}" for one in found.panels)
    said = f"{told}. Taken: {named(trace, node.token)}{', ' * bool(ending(node))}{ending(node)}"
    return document(body, WIDTH, y + 18, f"Processors of {asked.method}, step {node.born}", said)


def _panel(trace: Trace, found: Choice, panel: Panel, y: float, most: float, body: list[str]) -> float:
    """One processor's bars; where the next begins."""
    body += [text(panel.name, MARGIN, y, "s bold ink"), caption(panel.note, WIDTH - MARGIN, y, anchor="end")]
    body.append(line(MARGIN, y + 8, WIDTH - MARGIN, y + 8, "frame"))
    y += 16
    for bar in panel.bars:
        body.append(_bar(trace, found, bar, y, most))
        y += PITCH
    return y + 26


def _bar(trace: Trace, found: Choice, bar: Moved, y: float, most: float) -> str:
    left = MARGIN + 16 + WORD * CELL
    room = WIDTH - MARGIN - SAID - left
    before, after = (room * share(log) / most for log in (bar.before, bar.after))
    taken, gone = bar.token == found.node.token, share(bar.after) == 0.0 < share(bar.before)
    weight = "gone faint" if gone else "ink bold" if taken else "ink"
    pieces = clipped(word(trace, bar.token, True), WORD)
    parts = [
        text("→", MARGIN, y + 14, "accent bold") if taken else "",
        text(pieces, MARGIN + 14, y + 14, weight),
        box(left, y + 2, max(before, 1), 8, "bar", rx=2),
        "" if gone else box(left, y + 11, max(after, 1), 8, "accent", rx=2),
        text(change(bar), WIDTH - MARGIN, y + 14, "small bad" if gone else "small quiet", "end"),
    ]
    title = f"{named(trace, bar.token)}  {change(bar)}{'  cut' if gone else ''}"
    return titled(
        title, *parts, data_token=bar.token, data_before=repr(bar.before), data_after=repr(bar.after)
    )
