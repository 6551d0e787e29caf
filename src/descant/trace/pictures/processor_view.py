"""One choice of a sequence, and what the processors made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.figures import percent, several
from descant.trace.pictures.paths import path_of
from descant.trace.pictures.selection import Where
from descant.trace.records import Look, Moved
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Choice", "Panel", "change", "choice"]

BARS: Final = 8


@dataclass(frozen=True)
class Panel:
    """A processor, or all of them: what it says of itself, and tokens before and after it."""

    name: str
    note: str
    bars: Sequence[Moved]


@dataclass(frozen=True)
class Choice:
    """The choice of one token, with the tokens before it."""

    node: Node
    before: Sequence[int]
    panels: Sequence[Panel]


def choice(trace: Trace, where: Where) -> Choice | None:
    """The last choice of the sequence in the step, or before it; None: none was kept."""
    assert where.request is not None
    kept = [node for node in path_of(trace, where) if node.look is not None]
    if not kept:
        return None
    node = kept[-1]
    look = node.look
    assert look is not None
    above = trace.tree.path(node.number)[:-1]
    before = [*trace.requests[where.request].prompt, *(one.token for one in above if one.token is not None)]
    return Choice(node, before, _panels(look))


def _panels(look: Look) -> list[Panel]:
    """One for each processor that changed anything, and what they come to together."""
    panels = []
    for stage in look.stages:
        note = f"{several(stage.kept, 'token')} left"
        if stage.cut:
            note += f", {stage.cut} cut with {100 * stage.mass:.1f} % of the probability"
        panels.append(Panel(stage.name, note, stage.moved))
    bars = [Moved(one.token, one.raw, one.processed) for one in look.top[:BARS]]
    if not panels:
        return [Panel("the model", "nothing was changed", bars)]
    return [*panels, Panel("all together", "what the model said, and what was chosen from", bars)]


def change(bar: Moved) -> str:
    """A token before and after, in words."""
    return f"{percent(bar.before)} → {percent(bar.after)}" if bar.after != bar.before else percent(bar.after)
