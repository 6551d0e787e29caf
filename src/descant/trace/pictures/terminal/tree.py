"""The tree for a terminal: the best sequence down the left edge, its forks to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import TextPiece, join_pieces
from descant.trace.pictures.cells import cell_width, clip_pieces, pieces_width, pluralize, wrap_pieces
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal.canvas import NUM_GROUP_COLOURS, StyledText, TerminalCanvas
from descant.trace.pictures.tree_layout import Branch, layout_summary, layout_tree
from descant.trace.pictures.views import STATE_LABELS, constraint_progress, ending_label, group_letter
from descant.trace.records import RequestRecord
from descant.trace.trace_data import TraceData, text_pieces

__all__ = ["terminal_tree"]

SCORE_CELLS: Final = 9
MIN_TREE_CELLS: Final = 24  # with fewer cells no scores are shown
MAX_RUN_LINES: Final = 5  # lines of joined tokens
NUM_PROMPT_TOKENS: Final = 12  # shown tokens of the prompt


@dataclass(frozen=True)
class TreeLine:
    """One line: rails, text, and score and notes at the right."""

    rails: str
    pieces: Sequence[TextPiece]
    score: str
    notes: Sequence[str]
    style: str


def terminal_tree(selection: TraceSelection, canvas: TerminalCanvas) -> None:
    """The tree of one request, up to the selected step."""
    trace, request, layout = selection.trace, selection.request, layout_tree(selection, fold=True)
    canvas.heading(request.method, [layout_summary(layout)])
    prompt = clip_pieces(text_pieces(trace, request.prompt[-NUM_PROMPT_TOKENS:]), canvas.width)
    canvas.rows.append([(join_pieces(prompt), "dim")])
    lines = list(_tree_lines(trace, request, layout.root, canvas.width))
    right = max((cell_width("  ".join(line.notes)) for line in lines), default=0)
    right = SCORE_CELLS + (2 + right if right else 0)
    left = canvas.width - right if canvas.width - right >= MIN_TREE_CELLS else canvas.width
    for line in lines:
        row: list[StyledText] = [(line.rails, line.style if "bold" in line.style else "dim")]
        cells_left = left - cell_width(line.rails)
        clipped = clip_pieces(line.pieces, cells_left)
        row += [(text, f"{line.style} dim" if is_escaped else line.style) for text, is_escaped in clipped]
        if left < canvas.width:
            row.append((" " * (cells_left - pieces_width(clipped)), ""))
            row.append((f"{line.score:>{SCORE_CELLS}}", line.style or "dim"))
            row += [(f"  {note}", line.style) for note in line.notes]
        canvas.rows.append(row)
    scored = any(branch.last_node.score is not None for branch in layout.root.walk())
    kind = "summed log-probability, at an end as it was ranked" if scored else "probability"
    canvas.rows.append([])
    canvas.wrap(f"at the right: {kind}")


def _tree_lines(trace: TraceData, request: RequestRecord, root: Branch, width: int) -> Iterator[TreeLine]:
    """The lines below the prompt; at each fork the side branches come before the main branch."""
    for side in root.children[1:]:
        yield from _branch_lines(
            trace, request, side, "┠─" if root.children[0].state == "best" else "├─", width
        )
    if root.children:
        yield from _branch_lines(trace, request, root.children[0], "", width)


def _branch_lines(
    trace: TraceData, request: RequestRecord, first: Branch, hook: str, width: int
) -> Iterator[TreeLine]:
    """A main branch from its first part on, with its side branches.

    `hook` connects it to the branch that it forks off, up to its own rail.
    """
    best = first.state == "best"
    through, tee, end = ("┃", "┠─", "┗") if best else ("│", "├─", "╰")
    behind = "".join(_RAIL_BELOW.get(one, " ") for one in hook)
    branch: Branch | None = first
    while branch is not None:
        last = not branch.children
        lines = _branch_pieces(trace, branch, max(width - cell_width(hook) - 2 - SCORE_CELLS - 14, 8))
        for index, pieces in enumerate(lines):
            final = index == len(lines) - 1
            if branch is first and index == 0 and hook:
                rails = hook + ("─ " if last and final else "┬ ")
            else:
                rails = f"{behind}{end if last and final else through} "
            score, notes = (branch.label, _branch_notes(trace, request, branch)) if final else ("", [])
            yield TreeLine(rails, pieces, score, notes, _branch_style(branch, request))
        for side in branch.children[1:]:
            yield from _branch_lines(trace, request, side, behind + tee, width)
        branch = branch.children[0] if branch.children else None


_RAIL_BELOW: Final = {"├": "│", "┠": "┃", "│": "│", "┃": "┃"}  # character below each part of a hook


def _branch_pieces(trace: TraceData, branch: Branch, width: int) -> list[list[TextPiece]]:
    tokens = [node.token for node in branch.nodes if node.token is not None]
    lines = wrap_pieces(text_pieces(trace, tokens, mark_spaces=True), width)
    if len(lines) <= MAX_RUN_LINES:
        return lines
    return [*lines[: MAX_RUN_LINES - 2], [(f"⋯ {pluralize(len(tokens), 'token')} ⋯", True)], lines[-1]]


def _branch_notes(trace: TraceData, request: RequestRecord, branch: Branch) -> list[str]:
    """The notes after a score."""
    node, notes = branch.last_node, []
    if request.groups > 1:
        notes.append(group_letter(node.group))
    if progress := constraint_progress(trace, node):
        notes.append(f"◆{progress}")
    if not branch.children:
        notes.append(ending_label(node) or (STATE_LABELS["dropped"] if branch.state == "dropped" else ""))
    return [one for one in notes if one]


def _branch_style(branch: Branch, request: RequestRecord) -> str:
    if branch.state == "dropped" and not branch.leads_to_end:
        return "dim"
    colour = f"g{branch.last_node.group % NUM_GROUP_COLOURS}" if request.groups > 1 else "accent"
    if branch.state == "best":
        return f"bold {colour}"
    return colour if branch.state == "returned" else ""
