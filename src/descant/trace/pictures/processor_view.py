"""One choice of a sequence, and what the processors made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.number_format import format_percent, pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.records import ChoiceRecord, TokenShift
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["ChoiceView", "ProcessorPanel", "format_shift", "last_choice"]

MAX_BARS: Final = 8


@dataclass(frozen=True)
class ProcessorPanel:
    """A processor, or all of them: what it says of itself, and tokens before and after it."""

    name: str
    note: str
    bars: Sequence[TokenShift]


@dataclass(frozen=True)
class ChoiceView:
    """The choice of one token, with the tokens before it."""

    node: Node
    context_tokens: Sequence[int]
    panels: Sequence[ProcessorPanel]


def last_choice(trace: Trace, where: TraceSelection) -> ChoiceView | None:
    """The last choice of the sequence in the step, or before it; None: none was kept."""
    assert where.request is not None
    kept = [node for node in sequence_path(trace, where) if node.choice is not None]
    if not kept:
        return None
    node = kept[-1]
    look = node.choice
    assert look is not None
    above = trace.tree.path_to(node.number)[:-1]
    before = [*trace.requests[where.request].prompt, *(one.token for one in above if one.token is not None)]
    return ChoiceView(node, before, _processor_panels(look))


def _processor_panels(look: ChoiceRecord) -> list[ProcessorPanel]:
    """One for each processor that changed anything, and what they come to together."""
    panels = []
    for stage in look.stages:
        note = f"{pluralize(stage.kept, 'token')} left"
        if stage.cut:
            note += f", {stage.cut} cut with {100 * stage.mass:.1f} % of the probability"
        panels.append(ProcessorPanel(stage.name, note, stage.moved))
    bars = [TokenShift(one.token, one.raw, one.processed) for one in look.top[:MAX_BARS]]
    if not panels:
        return [ProcessorPanel("the model", "nothing was changed", bars)]
    return [*panels, ProcessorPanel("all together", "what the model said, and what was chosen from", bars)]


def format_shift(bar: TokenShift) -> str:
    """A token before and after, in words."""
    return (
        f"{format_percent(bar.before)} → {format_percent(bar.after)}"
        if bar.after != bar.before
        else format_percent(bar.after)
    )
