"""Draft tokens along a sequence, accepted and rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from descant.tokenization.display import TextPiece
from descant.trace.pictures.number_format import pluralize
from descant.trace.pictures.paths import sequence_path
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_cells import clip_pieces, pieces_width
from descant.trace.pictures.text_layout import LayoutToken
from descant.trace.pictures.text_stats import MAX_DRAWN_TOKENS, node_tokens
from descant.trace.records import RowRecord
from descant.trace.token_text import token_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = [
    "DraftPositionStats",
    "DraftedForward",
    "draft_position_stats",
    "draft_summary",
    "drawn_nodes",
    "forward_passes",
    "tokens_with_notes",
]

MAX_POSITIONS: Final = 100  # of drafts, in the chart
MAX_REJECTED_CELLS: Final = 14  # cells of a rejected draft token


@dataclass(frozen=True)
class DraftedForward:
    """One forward pass: its new tokens and the drafts that it verified."""

    step: int
    nodes: Sequence[Node]
    drafts: Sequence[int]
    num_accepted: int

    @property
    def rejected_drafts(self) -> Sequence[int]:
        """The rejected draft token, and those after it, which were not verified."""
        return self.drafts[self.num_accepted :]

    def rejection_pieces(self, trace: TraceData) -> list[TextPiece]:
        """The rejected draft token, and the number of unverified ones after it."""
        first, *rest = self.rejected_drafts
        return clip_pieces(token_pieces(trace, first, True), MAX_REJECTED_CELLS) + (
            [(f" +{len(rest)}", True)] if rest else []
        )


@dataclass(frozen=True)
class DraftPositionStats:
    """Proposed and accepted draft tokens at one draft position."""

    num_drafts: int
    num_accepted: int


def forward_passes(trace: TraceData, selection: TraceSelection) -> list[DraftedForward]:
    """The forward passes of a sequence, in order."""
    assert selection.request is not None
    rows: dict[tuple[int, int], RowRecord] = {}
    # Without a drafter, `drafts` holds candidates of the strategy itself.
    for step in trace.steps if trace.requests[selection.request].drafter is not None else ():
        for row in step.rows:
            for run in row.runs:
                rows |= {(step.step, node): row for node in run.nodes[:1]}
    passes = []
    for step_number, group in groupby(sequence_path(trace, selection), key=lambda node: node.step):
        nodes = list(group)
        row_record = rows.get((step_number, nodes[0].number))
        passes.append(
            DraftedForward(
                step_number,
                nodes,
                () if row_record is None else row_record.drafts,
                sum(n.is_draft for n in nodes),
            )
        )
    return passes


def tokens_with_notes(trace: TraceData, nodes: Sequence[Node], notes: Mapping[int, int]) -> list[LayoutToken]:
    """The tokens of nodes, with room for notes below; `notes` maps a node to the cells of its note.

    A note may extend below the following tokens, up to the next note.
    """
    placed = node_tokens(trace, nodes)
    needed, noted = 0, None
    for index, node in reversed(list(enumerate(nodes))):
        width = pieces_width(placed[index].pieces)
        if noted is None or placed[index].ends_line:
            needed, noted = 0, index  # the last token before the next note is widened if needed
        needed += width
        if node.number in notes:
            if lacking := max(notes[node.number] - needed, 0):
                last = placed[noted]
                placed[noted] = replace(last, min_width=pieces_width(last.pieces) + lacking)
            noted = None
    return placed


def drawn_nodes(passes: Sequence[DraftedForward]) -> list[Node]:
    """The new tokens of all passes, of a long sequence the last."""
    return [node for one in passes for node in one.nodes][-MAX_DRAWN_TOKENS:]


def draft_position_stats(passes: Sequence[DraftedForward]) -> list[DraftPositionStats]:
    """Acceptance by draft position, of at most `MAX_POSITIONS` positions."""
    longest = min(max((len(one.drafts) for one in passes), default=0), MAX_POSITIONS)
    ends = [[0] * (longest + 1) for _ in range(2)]  # passes whose drafts, accepted ones, end at a position
    for one in passes:
        ends[0][min(len(one.drafts), longest)] += 1
        ends[1][min(one.num_accepted, longest)] += 1
    drafts, accepted = ([sum(counts[at + 1 :]) for at in range(longest)] for counts in ends)
    return [DraftPositionStats(*pair) for pair in zip(drafts, accepted, strict=True)]


def draft_summary(passes: Sequence[DraftedForward]) -> list[str]:
    """Totals of the drafts, as text."""
    tokens = sum(len(one.nodes) for one in passes)
    drafts, accepted = sum(len(one.drafts) for one in passes), sum(one.num_accepted for one in passes)
    parts = [pluralize(len(passes), "forward"), pluralize(tokens, "token")]
    if tokens > MAX_DRAWN_TOKENS:
        parts.append(f"the last {MAX_DRAWN_TOKENS:,} drawn")
    if passes:
        parts.append(f"{tokens / len(passes):.2f} tokens a forward")
    parts.append(
        f"{accepted} of {pluralize(drafts, 'guess', 'guesses')} stood ({100 * accepted / drafts:.1f} %)"
        if drafts
        else "nothing was guessed"
    )
    return parts
