"""The tree for a terminal: the best sequence down the left edge, its forks to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import TextPiece
from descant.trace.pictures.node_labels import STATE_LABELS, constraint_progress, ending_label, group_letter
from descant.trace.pictures.number_format import pluralize
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_canvas import NUM_GROUP_COLOURS, StyledText, TerminalCanvas
from descant.trace.pictures.terminal_cells import cell_width, clip_pieces, pieces_width, wrap_pieces
from descant.trace.pictures.tree_layout import Branch, layout_summary, layout_tree
from descant.trace.records import RequestRecord
from descant.trace.token_text import text_pieces
from descant.trace.trace_data import TraceData

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


def terminal_tree(trace: TraceData, selection: TraceSelection, canvas: TerminalCanvas) -> str:
    """The tree of one request, up to the selected step."""
    assert selection.request is not None
    request, layout = trace.requests[selection.request], layout_tree(trace, selection, fold=True)
    lines = list(_tree_lines(trace, request, layout.root, canvas.width))
    right = max((cell_width("  ".join(one.notes)) for one in lines), default=0)
    right = SCORE_CELLS + (2 + right if right else 0)
    left = canvas.width - right if canvas.width - right >= MIN_TREE_CELLS else canvas.width
    prompt = clip_pieces(text_pieces(trace, request.prompt[-NUM_PROMPT_TOKENS:]), canvas.width)
    rows: list[list[StyledText]] = [
        *canvas.wrap_text(request.method, "bold"),
        *canvas.wrap_text(layout_summary(layout)),
        [],
    ]
    rows.append([("".join(one for one, _ in prompt), "dim")])
    for one in lines:
        row: list[StyledText] = [(one.rails, one.style if "bold" in one.style else "dim")]
        cells_left = left - cell_width(one.rails)
        clipped = clip_pieces(one.pieces, cells_left)
        row += [(text, f"{one.style} dim" if is_escaped else one.style) for text, is_escaped in clipped]
        if left < canvas.width:
            row.append((" " * (cells_left - pieces_width(clipped)), ""))
            row.append((f"{one.score:>{SCORE_CELLS}}", one.style or "dim"))
            row += [(f"  {note}", one.style) for note in one.notes]
        rows.append(row)
    scored = any(branch.last_node.score is not None for branch in layout.root.walk())
    kind = "summed log-probability, at an end as it was ranked" if scored else "probability"
    rows += [[], *canvas.wrap_text(f"at the right: {kind}")]
    return canvas.format_lines(rows)


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
