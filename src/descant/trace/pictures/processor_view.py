"""One choice of a sequence, and the effect of each processor on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from descant.trace.pictures.number_format import format_percent, pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.records import ChoiceRecord, TokenShift
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = ["ChoiceView", "ProcessorPanel", "format_shift", "last_choice"]

MAX_BARS: Final = 8


@dataclass(frozen=True)
class ProcessorPanel:
    """One processor, or all of them together: a note, and tokens before and after."""

    name: str
    note: str
    bars: Sequence[TokenShift]


@dataclass(frozen=True)
class ChoiceView:
    """The choice of one token, with its context."""

    node: Node
    context_tokens: Sequence[int]
    panels: Sequence[ProcessorPanel]


def last_choice(trace: TraceData, selection: TraceSelection) -> ChoiceView | None:
    """The last recorded choice of the sequence up to the selected step; None: no choice is recorded."""
    assert selection.request is not None
    with_choice = [node for node in sequence_path(trace, selection) if node.choice is not None]
    if not with_choice:
        return None
    node = with_choice[-1]
    choice = node.choice
    assert choice is not None
    ancestors = trace.tree.path_to(node.number)[:-1]
    before = [
        *trace.requests[selection.request].prompt,
        *(one.token for one in ancestors if one.token is not None),
    ]
    return ChoiceView(node, before, _processor_panels(choice))


def _processor_panels(choice: ChoiceRecord) -> list[ProcessorPanel]:
    """One panel per processor with an effect, and one for all together."""
    panels = []
    for stage in choice.stages:
        note = f"{pluralize(stage.kept, 'token')} left"
        if stage.cut:
            note += f", {stage.cut} cut with {100 * stage.mass:.1f} % of the probability"
        panels.append(ProcessorPanel(stage.name, note, stage.moved))
    bars = [TokenShift(one.token, one.raw, one.processed) for one in choice.top[:MAX_BARS]]
    if not panels:
        return [ProcessorPanel("the model", "nothing was changed", bars)]
    return [*panels, ProcessorPanel("all together", "what the model said, and what was chosen from", bars)]


def format_shift(bar: TokenShift) -> str:
    """The probability of a token before and after, as text."""
    return (
        f"{format_percent(bar.before)} → {format_percent(bar.after)}"
        if bar.after != bar.before
        else format_percent(bar.after)
    )
