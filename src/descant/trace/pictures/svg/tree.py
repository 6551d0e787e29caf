"""The tree as SVG: hypotheses from left to right, the best on a straight line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from descant.tokenization.display import TextPiece, join_pieces
from descant.trace.pictures.cells import clip_pieces, format_score, pieces_width, pluralize, wrap_pieces
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg.elements import (
    CELL_WIDTH,
    NUM_GROUP_COLOURS,
    box,
    caption,
    element,
    line,
    path,
    svg_document,
    text,
    titled_group,
)
from descant.trace.pictures.tree_layout import Branch, TreeLayout, layout_summary, layout_tree
from descant.trace.pictures.views import (
    STATE_LABELS,
    constraint_progress,
    ending_label,
    group_letter,
    tooltip_lines,
)
from descant.trace.records import RequestRecord
from descant.trace.trace_data import TraceData, text_pieces
from descant.trace.tree import Node

__all__ = ["svg_tree"]

MARGIN: Final = 22.0
TOP: Final = 62.0  # of the tree, below the heading
BOX_HEIGHT, LINE_PITCH = 25.0, 17.0  # height of a box with one line, and of each further line
PADDING: Final = 8.0  # between a box and its text
EDGE_CURVE, EDGE_TAIL = 18.0, 38.0  # width of an edge's curve, and of its straight end with the score
UNSCORED_EDGE: Final = 24.0  # width of an edge without a score
BOX_GAP: Final = 9.0  # between boxes of a column
TOKEN_CELLS, RUN_CELLS = 16, 22  # width of a token, and of a line of joined tokens
UNFORKED_CELLS: Final = 64  # width of such a line if nothing forks
MAX_RUN_LINES: Final = 6  # lines of joined tokens
MAX_DESCRIBED_TOKENS: Final = 1_000  # of a sequence, in the description for screen readers
PROMPT_CELLS: Final = 14  # width of the prompt's end


@dataclass
class TreeBox:
    """A branch with its text and position."""

    branch: Branch
    lines: list[list[TextPiece]]
    level: int
    label: str  # score on its edge
    children: list[TreeBox] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0  # middle

    @property
    def width(self) -> float:
        return max(max(map(pieces_width, self.lines), default=0) * CELL_WIDTH + 2 * PADDING, BOX_HEIGHT)

    @property
    def height(self) -> float:
        return BOX_HEIGHT + LINE_PITCH * (len(self.lines) - 1)

    def walk(self) -> Iterator[TreeBox]:
        """This box and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def shift(self, by: float) -> None:
        for one in self.walk():
            one.y += by


def svg_tree(selection: TraceSelection) -> str:
    """The tree of one request, up to the selected step."""
    trace, request, layout = selection.trace, selection.request, layout_tree(selection)
    root = _make_box(trace, layout, layout.root, 0, _last_folded_level(layout))
    _place_vertically(root, BOX_GAP if request.demands is None else BOX_GAP + 6)
    boxes = list(root.walk())
    right = _place_columns(boxes)
    highest = min(one.y - one.height / 2 for one in boxes)
    root.shift(TOP - highest)
    lowest = max(one.y + one.height / 2 for one in boxes)
    tree = [
        *(_draw_edges(one, request) for one in reversed(boxes)),
        *(_draw_box(trace, one, request) for one in boxes),
    ]
    legend, legend_right, legend_bottom = _draw_legend(request, boxes, lowest + 30)
    width = max(right + MARGIN, legend_right + MARGIN, 360)
    heading = [text(request.method, MARGIN, 32, "s big ink"), caption(layout_summary(layout), MARGIN, 49)]
    return svg_document(
        [*heading, *tree, *legend],
        width,
        legend_bottom + 16,
        f"Tree of {request.method}",
        _describe_tree(trace, layout),
    )


# ------------------------------------------------------------------------ layout
def _last_folded_level(layout: TreeLayout) -> int:
    """The last column of joined tokens; later columns are given by token depth."""

    def deepest(branch: Branch, level: int) -> int:
        if branch.last_node.depth > layout.folded_depth:
            return 0
        return max([level, *(deepest(one, level + 1) for one in branch.children)])

    return deepest(layout.root, 0)


def _make_box(trace: TraceData, layout: TreeLayout, branch: Branch, level: int, base: int) -> TreeBox:
    single = branch.last_node.depth > layout.folded_depth
    if single:
        level = base + branch.last_node.depth - layout.folded_depth
    run = UNFORKED_CELLS if layout.root.num_levels() == 2 and not layout.num_hidden else RUN_CELLS
    node_box = TreeBox(branch, _box_lines(trace, branch, single, run), level, branch.label)
    node_box.children = [_make_box(trace, layout, one, level + 1, base) for one in branch.children]
    return node_box


def _box_lines(trace: TraceData, branch: Branch, single: bool, run: int) -> list[list[TextPiece]]:
    node = branch.last_node
    if node.token is None:
        prompt = text_pieces(trace, trace.requests[node.request].prompt[-PROMPT_CELLS:])
        prompt_text = join_pieces(prompt)
        shown = (
            prompt_text
            if pieces_width(prompt) <= PROMPT_CELLS
            else "…" + _text_tail(prompt_text, PROMPT_CELLS - 1)
        )
        return [[(shown, False)] if shown else [("start", True)]]
    tokens = [one.token for one in branch.nodes if one.token is not None]
    pieces = text_pieces(trace, tokens, mark_spaces=True)
    if single and len(tokens) == 1:
        return [clip_pieces(pieces, TOKEN_CELLS)]
    lines = wrap_pieces(pieces, run)
    if len(lines) > MAX_RUN_LINES:
        left_out = [(f"⋯ {pluralize(len(tokens), 'token')} ⋯", True)]
        lines = [*lines[: MAX_RUN_LINES - 3], left_out, *lines[-2:]]
    return lines


def _text_tail(prompt_text: str, width: int) -> str:
    """The last `width` cells of a text, from the start of a word if there is one."""
    tail = prompt_text[-width:]  # of which every character takes a cell, or none
    while pieces_width([(tail, False)]) > width:
        tail = tail[1:]
    _, space, from_word = tail.partition(" ")
    return from_word if space and from_word.strip() else tail


def _place_vertically(node_box: TreeBox, gap: float) -> dict[int, tuple[float, float]]:
    """Place the boxes below a box; returns top and bottom of every column.

    The first branch stays level. Each further one goes above or below what is already placed, whichever is
    nearer, so that no edges cross.
    """
    extents = {node_box.level: (node_box.y - node_box.height / 2, node_box.y + node_box.height / 2)}
    for index, child in enumerate(node_box.children):
        child.y = node_box.y
        child_extents = _place_vertically(child, gap)
        shared = [level for level in child_extents if level in extents]
        if index and shared:
            distance_up = min(extents[level][0] - child_extents[level][1] for level in shared) - gap
            distance_down = max(extents[level][1] - child_extents[level][0] for level in shared) + gap
            distance = distance_down if distance_down <= -distance_up else distance_up
            child.shift(distance)
            child_extents = {
                level: (top + distance, bottom + distance) for level, (top, bottom) in child_extents.items()
            }
        for level, (top, bottom) in child_extents.items():
            before = extents.get(level, (top, bottom))
            extents[level] = (min(before[0], top), max(before[1], bottom))
    return extents


def _place_columns(boxes: Sequence[TreeBox]) -> float:
    """Set the x of every box; returns the right edge of the last column."""
    right, edge = 0.0, MARGIN
    for level in range(max(one.level for one in boxes) + 1):
        column = [one for one in boxes if one.level == level]
        if level:
            edge += EDGE_CURVE + EDGE_TAIL if any(one.label for one in column) else UNSCORED_EDGE
        width = 0.0
        for one in column:
            one.x = edge
            width = max(width, one.width + (len(_end_note(one)) * 6.4 + 8 if _end_note(one) else 0))
        edge += width
        right = max(right, edge)
    return right


# ------------------------------------------------------------------------ drawing
def _draw_edges(node_box: TreeBox, request: RequestRecord) -> str:
    """The edges to a box's children, with scores; the best is drawn last, above the others."""
    parts = []
    for child in reversed(node_box.children):
        start, end = node_box.x + node_box.width, child.x
        curve_end = end - (EDGE_TAIL if child.label else 6)
        # Level up to the end of its column, so that it crosses no box.
        curve_start = max(curve_end - EDGE_CURVE, start)
        half = (curve_start + curve_end) / 2
        curve = (
            f"M{start:.1f} {node_box.y:.1f}H{curve_start:.1f}C{half:.1f} {node_box.y:.1f} "
            f"{half:.1f} {child.y:.1f} {curve_end:.1f} {child.y:.1f}H{end:.1f}"
        )
        kind, width = _stroke_style(child, request)
        parts.append(path(curve, kind, width))
        if child.label:
            weight = f"{_best_text_class(child, request)} bold" if child.branch.state == "best" else "faint"
            parts.append(text(child.label, end - 4, child.y - 5, f"small {weight}", "end"))
        if request.groups > 1:
            group = child.branch.last_node.group
            weight = "faint" if kind == "rule dash" else f"bold f{group % NUM_GROUP_COLOURS}"
            parts.append(text(group_letter(group), end - 5, child.y + 12.5, f"small {weight}", "end"))
    return element("g", *parts) if parts else ""


def _stroke_style(node_box: TreeBox, request: RequestRecord) -> tuple[str, float]:
    """CSS class and width of the lines of a box."""
    state = node_box.branch.state
    if state == "dropped" and not node_box.branch.leads_to_end:
        return "rule dash", 1
    if state in ("dropped", "ended"):
        return "rule", 1.2
    colour = f"g{node_box.branch.last_node.group % NUM_GROUP_COLOURS}" if request.groups > 1 else "strong"
    return colour, 2.4 if state == "best" else 1.2


def _best_text_class(node_box: TreeBox, request: RequestRecord) -> str:
    """CSS class of the text of the best sequence."""
    return f"f{node_box.branch.last_node.group % NUM_GROUP_COLOURS}" if request.groups > 1 else "accent"


def _draw_box(trace: TraceData, node_box: TreeBox, request: RequestRecord) -> str:
    branch, node = node_box.branch, node_box.branch.last_node
    x, top = node_box.x, node_box.y - node_box.height / 2
    if node.token is None:
        return titled_group(
            "prompt",
            box(x, top, node_box.width, node_box.height, "sheet"),
            text(node_box.lines[0], x + node_box.width / 2, node_box.y + 4.5, "quiet", "middle"),
            data_node=node.number,
        )
    best = branch.state == "best"
    kind, width = _stroke_style(node_box, request)
    fill = "hole" if not best else "wash" if request.groups == 1 else "sheet"
    parts = [box(x, top, node_box.width, node_box.height, f"{fill} {kind}", stroke_width=min(width, 1.6))]
    weight = "ink bold" if best else "ink" if branch.state in ("returned", "alive") else "quiet"
    for at, letters in enumerate(node_box.lines):
        parts.append(text(letters, x + node_box.width / 2, top + 17 + LINE_PITCH * at, weight, "middle"))
    if node.is_draft and len(branch.nodes) == 1:
        parts.append(line(x + PADDING, top + 21, x + node_box.width - PADDING, top + 21, "right dots", 1.5))
    if progress := constraint_progress(trace, node):
        parts.append(text(f"◆{progress}", x + node_box.width - 3, top - 2.5, "small warm bold", "end"))
    if note := _end_note(node_box):
        parts.append(
            caption(
                note,
                x + node_box.width + 7,
                node_box.y + 4,
                f"{_best_text_class(node_box, request)} bold" if best else "quiet",
            )
        )
    tooltip = [one for each in branch.nodes[-1:] for one in tooltip_lines(trace, each, branch.state)]
    return titled_group(
        tooltip,
        *parts,
        data_node=node.number,
        data_token=node.token,
        data_state=branch.state,
        data_score=None if node.score is None else repr(node.score),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _end_note(node_box: TreeBox) -> str:
    """The note after the last box of a sequence."""
    return ending_label(node_box.branch.last_node) if not node_box.branch.children else ""


# ------------------------------------------------------------------------ legend and description
def _draw_legend(
    request: RequestRecord, boxes: Sequence[TreeBox], y: float
) -> tuple[list[str], float, float]:
    """The legend of the marks in use, with its right and bottom edges."""
    present = {one.branch.state for one in boxes if one.branch.last_node.token is not None}
    x, parts = MARGIN, list[str]()
    for state, name in STATE_LABELS.items():
        if state not in present:
            continue
        mark = {"dropped": "rule dash", "ended": "rule"}.get(
            state, "strong" if request.groups == 1 else "firm"
        )
        kind = "hole" if state != "best" else "wash" if request.groups == 1 else "sheet"
        parts += [
            box(x, y - 10, 18, 12, f"{kind} {mark}", stroke_width=1.6 if state == "best" else 1.1, rx=4),
            caption(name, x + 24, y),
        ]
        x += 24 + len(name) * 6.2 + 18
    notes = []
    if any(one.branch.last_node.score is not None for one in boxes):
        notes.append("on the edges: summed log-probability, at an end as it was ranked")
    elif any(one.label for one in boxes):
        notes.append("on the edges: probability")
    if request.groups > 1:
        notes.append("letters: groups of beams")
    if any(one.branch.last_node.met is not None for one in boxes):
        notes.append("◆ tokens of the constraints that are met")
    if any(one.branch.last_node.is_draft for one in boxes):
        notes.append("dotted: guessed ahead")
    for at, note in enumerate(notes):
        parts.append(caption(note, MARGIN, y + 20 + 17 * at))
    right = max([x, *(MARGIN + len(note) * 6.2 for note in notes)])
    return parts, right, y + 17 * len(notes) + 4


def _last_tokens(trace: TraceData, node: Node) -> list[int]:
    """The tokens up to a node, of a long path the last."""
    tokens: list[int] = []
    while node.token is not None and node.parent is not None and len(tokens) < MAX_DESCRIBED_TOKENS:
        tokens.append(node.token)
        node = trace.tree.node(node.parent)
    return tokens[::-1]


def _describe_tree(trace: TraceData, layout: TreeLayout) -> str:
    """The tree as text, for screen readers."""
    ends = [one for one in layout.root.walk() if not one.children and one.last_node.token is not None]
    parts = []
    for end in ends:
        if end.state in ("best", "returned", "alive", "ended"):
            tokens = _last_tokens(trace, end.last_node)
            score = "" if end.last_node.score is None else f", score {format_score(end.last_node.score)}"
            parts.append(
                f"{STATE_LABELS[end.state]}{score}: {join_pieces(text_pieces(trace, tokens)).strip()}"
            )
    dropped = sum(one.state == "dropped" for one in ends)
    return ". ".join([*parts, f"{pluralize(dropped, 'branch', 'branches')} dropped"])
