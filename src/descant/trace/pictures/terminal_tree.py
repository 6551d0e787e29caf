"""The tree for a terminal: the best sequence down the left edge, what forked off it to its right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import TextPiece
from descant.trace.pictures.node_labels import STATE_LABELS, constraint_progress, ending_label, group_letter
from descant.trace.pictures.number_format import pluralize
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import NUM_GROUP_COLOURS, StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, pieces_width, wrap_pieces
from descant.trace.pictures.tree_layout import Branch, layout_summary, layout_tree
from descant.trace.records import RequestRecord
from descant.trace.token_text import text_pieces

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_tree"]

SCORE_CELLS: Final = 9  # cells
MIN_TREE_CELLS: Final = 24  # cells of the tree itself; with fewer there are no scores
MAX_RUN_LINES: Final = 5  # lines of one run
NUM_PROMPT_TOKENS: Final = 12  # tokens of it


@dataclass(frozen=True)
class TreeLine:
    """One line: its rails, letters, and what stands at the right."""

    rails: str
    pieces: Sequence[TextPiece]
    score: str
    notes: Sequence[str]
    style: str


def terminal_tree(trace: Trace, where: TraceSelection, paper: TerminalCanvas) -> str:
    """The tree of one request, as far as the step."""
    assert where.request is not None
    asked, planned = trace.requests[where.request], layout_tree(trace, where, fold=True)
    lines = list(_tree_lines(trace, asked, planned.root, paper.width))
    right = max((cell_width("  ".join(one.notes)) for one in lines), default=0)
    right = SCORE_CELLS + (2 + right if right else 0)
    left = paper.width - right if paper.width - right >= MIN_TREE_CELLS else paper.width
    prompt = clip_pieces(text_pieces(trace, asked.prompt[-NUM_PROMPT_TOKENS:]), paper.width)
    rows: list[list[StyledText]] = [
        *paper.wrap_text(asked.method, "bold"),
        *paper.wrap_text(layout_summary(planned)),
        [],
    ]
    rows.append([("".join(one for one, _ in prompt), "dim")])
    for one in lines:
        row: list[StyledText] = [(one.rails, one.style if "bold" in one.style else "dim")]
        room = left - cell_width(one.rails)
        kept = clip_pieces(one.pieces, room)
        row += [(said, f"{one.style} dim" if stands else one.style) for said, stands in kept]
        if left < paper.width:
            row.append((" " * (room - pieces_width(kept)), ""))
            row.append((f"{one.score:>{SCORE_CELLS}}", one.style or "dim"))
            row += [(f"  {note}", one.style) for note in one.notes]
        rows.append(row)
    scored = any(branch.last_node.score is not None for branch in planned.root.walk())
    kind = "summed log-probability, at an end as it was ranked" if scored else "probability"
    rows += [[], *paper.wrap_text(f"at the right: {kind}")]
    return paper.format_lines(rows)


def _tree_lines(trace: Trace, asked: RequestRecord, root: Branch, width: int) -> Iterator[TreeLine]:
    """The lines below the prompt: its main line, and before each next part of that what forks off there."""
    for side in root.children[1:]:
        yield from _branch_lines(
            trace, asked, side, "┠─" if root.children[0].state == "best" else "├─", width
        )
    if root.children:
        yield from _branch_lines(trace, asked, root.children[0], "", width)


def _branch_lines(
    trace: Trace, asked: RequestRecord, first: Branch, hook: str, width: int
) -> Iterator[TreeLine]:
    """A main line from its first branch on, with what forks off it.

    `hook` is what ties it to the line that it forks off, as far right as its own rail.
    """
    best = first.state == "best"
    through, tee, end = ("┃", "┠─", "┗") if best else ("│", "├─", "╰")
    behind = "".join(_RAIL_BELOW.get(one, " ") for one in hook)
    at: Branch | None = first
    while at is not None:
        last = not at.children
        lines = _branch_pieces(trace, at, max(width - cell_width(hook) - 2 - SCORE_CELLS - 14, 8))
        for place, pieces in enumerate(lines):
            final = place == len(lines) - 1
            if at is first and place == 0 and hook:
                rails = hook + ("─ " if last and final else "┬ ")
            else:
                rails = f"{behind}{end if last and final else through} "
            score, notes = (at.label, _branch_notes(trace, asked, at)) if final else ("", [])
            yield TreeLine(rails, pieces, score, notes, _branch_style(at, asked))
        for side in at.children[1:]:
            yield from _branch_lines(trace, asked, side, behind + tee, width)
        at = at.children[0] if at.children else None


_RAIL_BELOW: Final = {"├": "│", "┠": "┃", "│": "│", "┃": "┃"}  # what stands below each part of a hook


def _branch_pieces(trace: Trace, branch: Branch, width: int) -> list[list[TextPiece]]:
    tokens = [node.token for node in branch.nodes if node.token is not None]
    lines = wrap_pieces(text_pieces(trace, tokens, mark_spaces=True), width)
    if len(lines) <= MAX_RUN_LINES:
        return lines
    return [*lines[: MAX_RUN_LINES - 2], [(f"⋯ {pluralize(len(tokens), 'token')} ⋯", True)], lines[-1]]


def _branch_notes(trace: Trace, asked: RequestRecord, branch: Branch) -> list[str]:
    """What is said behind a score."""
    node, said = branch.last_node, []
    if asked.groups > 1:
        said.append(group_letter(node.group))
    if met := constraint_progress(trace, node):
        said.append(f"◆{met}")
    if not branch.children:
        said.append(ending_label(node) or (STATE_LABELS["dropped"] if branch.state == "dropped" else ""))
    return [one for one in said if one]


def _branch_style(branch: Branch, asked: RequestRecord) -> str:
    if branch.state == "dropped" and not branch.leads_to_end:
        return "dim"
    own = f"g{branch.last_node.group % NUM_GROUP_COLOURS}" if asked.groups > 1 else "accent"
    if branch.state == "best":
        return f"bold {own}"
    return own if branch.state == "returned" else ""
