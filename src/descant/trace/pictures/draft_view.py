"""What was guessed along a sequence, and what of it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import TextPiece
from descant.trace.pictures.number_format import pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_cells import clip_pieces, pieces_width
from descant.trace.pictures.text_layout import LayoutToken
from descant.trace.pictures.text_stats import node_tokens
from descant.trace.records import RowRecord
from descant.trace.token_text import token_pieces
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = [
    "DraftPositionStats",
    "DraftedForward",
    "draft_position_stats",
    "draft_summary",
    "forward_passes",
    "tokens_with_notes",
]

MAX_REJECTED_CELLS: Final = 14  # cells of a guess that did not stand


@dataclass(frozen=True)
class DraftedForward:
    """One pass of the model: the tokens that it gave, and the guesses that it judged."""

    step: int
    nodes: Sequence[Node]
    drafts: Sequence[int]
    num_accepted: int

    @property
    def rejected_drafts(self) -> Sequence[int]:
        """The guess that did not stand, and those behind it, which were never judged."""
        return self.drafts[self.num_accepted :]

    def rejection_pieces(self, trace: Trace) -> list[TextPiece]:
        """The guess that did not stand, and how many behind it were never judged."""
        first, *rest = self.rejected_drafts
        return clip_pieces(token_pieces(trace, first, True), MAX_REJECTED_CELLS) + (
            [(f" +{len(rest)}", True)] if rest else []
        )


@dataclass(frozen=True)
class DraftPositionStats:
    """How often there was a first, second, ... guess, and how often it stood."""

    num_drafts: int
    num_accepted: int


def forward_passes(trace: Trace, where: TraceSelection) -> list[DraftedForward]:
    """The passes that the sequence took, in order."""
    assert where.request is not None
    rows: dict[tuple[int, int], RowRecord] = {}
    # Without a drafter what is called drafts are a method's own candidates.
    for step in trace.steps if trace.requests[where.request].drafter is not None else ():
        for row in step.rows:
            for run in row.runs:
                rows |= {(step.step, node): row for node in run.nodes[:1]}
    found = []
    for born, group in groupby(sequence_path(trace, where), key=lambda node: node.step):
        nodes = list(group)
        taken = rows.get((born, nodes[0].number))
        found.append(
            DraftedForward(born, nodes, () if taken is None else taken.drafts, sum(n.is_draft for n in nodes))
        )
    return found


def tokens_with_notes(trace: Trace, nodes: Sequence[Node], notes: Mapping[int, int]) -> list[LayoutToken]:
    """The tokens of nodes with room for a note below some of them, whose cells are given by node.

    A note may reach below the tokens behind its own, as far as the next note.
    """
    placed = node_tokens(trace, nodes)
    needed, noted = 0, None
    for at, node in reversed(list(enumerate(nodes))):
        wide = pieces_width(placed[at].pieces)
        if noted is None or placed[at].ends_line:
            needed, noted = 0, at  # the last token before the next note has the room that is lacking
        needed += wide
        if node.number in notes:
            if lacking := max(notes[node.number] - needed, 0):
                last = placed[noted]
                placed[noted] = replace(last, min_width=pieces_width(last.pieces) + lacking)
            noted = None
    return placed


def draft_position_stats(passes: Sequence[DraftedForward]) -> list[DraftPositionStats]:
    """The guesses by their place."""
    longest = max((len(one.drafts) for one in passes), default=0)
    return [
        DraftPositionStats(
            sum(len(one.drafts) > at for one in passes), sum(one.num_accepted > at for one in passes)
        )
        for at in range(longest)
    ]


def draft_summary(passes: Sequence[DraftedForward]) -> list[str]:
    """What the guesses come to, in words."""
    tokens = sum(len(one.nodes) for one in passes)
    drafts, stood = sum(len(one.drafts) for one in passes), sum(one.num_accepted for one in passes)
    said = [pluralize(len(passes), "forward"), pluralize(tokens, "token")]
    if passes:
        said.append(f"{tokens / len(passes):.2f} tokens a forward")
    said.append(
        f"{stood} of {pluralize(drafts, 'guess', 'guesses')} stood ({100 * stood / drafts:.1f} %)"
        if drafts
        else "nothing was guessed"
    )
    return said
