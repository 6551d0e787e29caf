"""What was guessed along a sequence, and what of it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import Piece
from descant.trace.pictures.figures import several
from descant.trace.pictures.paths import path_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_cells import clipped, width_of
from descant.trace.pictures.text_layout import Word
from descant.trace.pictures.text_stats import words
from descant.trace.records import Row
from descant.trace.token_text import word
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Forward", "Position", "forwards", "positions", "spaced", "summary"]

LONGEST: Final = 14  # cells of a guess that did not stand


@dataclass(frozen=True)
class Forward:
    """One pass of the model: the tokens that it gave, and the guesses that it judged."""

    step: int
    nodes: Sequence[Node]
    drafts: Sequence[int]
    accepted: int

    @property
    def rejected(self) -> Sequence[int]:
        """The guess that did not stand, and those behind it, which were never judged."""
        return self.drafts[self.accepted :]

    def rejection(self, trace: Trace) -> list[Piece]:
        """The guess that did not stand, and how many behind it were never judged."""
        first, *rest = self.rejected
        return clipped(word(trace, first, True), LONGEST) + ([(f" +{len(rest)}", True)] if rest else [])


@dataclass(frozen=True)
class Position:
    """How often there was a first, second, ... guess, and how often it stood."""

    tried: int
    stood: int


def forwards(trace: Trace, where: Where) -> list[Forward]:
    """The passes that the sequence took, in order."""
    assert where.request is not None
    rows: dict[tuple[int, int], Row] = {}
    # Without a drafter what is called drafts are a method's own candidates.
    for step in trace.steps if trace.requests[where.request].drafter is not None else ():
        for row in step.rows:
            for run in row.runs:
                rows |= {(step.step, node): row for node in run.nodes[:1]}
    found = []
    for born, group in groupby(path_of(trace, where), key=lambda node: node.born):
        nodes = list(group)
        taken = rows.get((born, nodes[0].number))
        found.append(
            Forward(born, nodes, () if taken is None else taken.drafts, sum(n.guessed for n in nodes))
        )
    return found


def spaced(trace: Trace, nodes: Sequence[Node], notes: Mapping[int, int]) -> list[Word]:
    """The tokens of nodes with room for a note below some of them, whose cells are given by node.

    A note may reach below the tokens behind its own, as far as the next note.
    """
    placed = words(trace, nodes)
    needed, noted = 0, None
    for at, node in reversed(list(enumerate(nodes))):
        wide = width_of(placed[at].pieces)
        if noted is None or placed[at].ends:
            needed, noted = 0, at  # the last token before the next note has the room that is lacking
        needed += wide
        if node.number in notes:
            if lacking := max(notes[node.number] - needed, 0):
                last = placed[noted]
                placed[noted] = replace(last, room=width_of(last.pieces) + lacking)
            noted = None
    return placed


def positions(passes: Sequence[Forward]) -> list[Position]:
    """The guesses by their place."""
    longest = max((len(one.drafts) for one in passes), default=0)
    return [
        Position(sum(len(one.drafts) > at for one in passes), sum(one.accepted > at for one in passes))
        for at in range(longest)
    ]


def summary(passes: Sequence[Forward]) -> list[str]:
    """What the guesses come to, in words."""
    tokens = sum(len(one.nodes) for one in passes)
    drafts, stood = sum(len(one.drafts) for one in passes), sum(one.accepted for one in passes)
    said = [several(len(passes), "forward"), several(tokens, "token")]
    if passes:
        said.append(f"{tokens / len(passes):.2f} tokens a forward")
    said.append(
        f"{stood} of {several(drafts, 'guess', 'guesses')} stood ({100 * stood / drafts:.1f} %)"
        if drafts
        else "nothing was guessed"
    )
    return said
