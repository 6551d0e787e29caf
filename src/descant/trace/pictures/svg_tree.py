"""The tree as SVG: every hypothesis from left to right, the best on a straight line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import TextPiece, join_pieces
from descant.trace.pictures.node_labels import (
    STATE_LABELS,
    constraint_progress,
    ending_label,
    group_letter,
    tooltip_lines,
)
from descant.trace.pictures.number_format import format_score, pluralize
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg_elements import (
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
from descant.trace.pictures.terminal_cells import clip_pieces, pieces_width, wrap_pieces
from descant.trace.pictures.tree_layout import Branch, TreeLayout, layout_summary, layout_tree
from descant.trace.records import RequestRecord
from descant.trace.token_text import text_pieces

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_tree"]

MARGIN: Final = 22.0
TOP: Final = 62.0  # of the tree, below the heading
BOX_HEIGHT, LINE_PITCH = 25.0, 17.0  # of a box with one line, and of each further line
PADDING: Final = 8.0  # between a box and its letters
EDGE_CURVE, EDGE_TAIL = 18.0, 38.0  # of an edge: its curve, and the straight end that has the score above it
UNSCORED_EDGE: Final = 24.0  # an edge without a score
BOX_GAP: Final = 9.0  # boxes of one column
TOKEN_CELLS, RUN_CELLS = 16, 22  # cells of a token, and of a line of joined tokens
UNFORKED_CELLS: Final = 64  # cells of such a line where nothing forks
MAX_RUN_LINES: Final = 6  # of joined tokens
PROMPT_CELLS: Final = 14  # cells of a prompt's end


@dataclass
class TreeBox:
    """A branch with its letters and its place."""

    branch: Branch
    lines: list[list[TextPiece]]
    level: int
    label: str  # the score on its edge
    children: list[TreeBox] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0  # of its middle

    @property
    def width(self) -> float:
        return max(max(map(pieces_width, self.lines), default=0) * CELL_WIDTH + 2 * PADDING, BOX_HEIGHT)

    @property
    def height(self) -> float:
        return BOX_HEIGHT + LINE_PITCH * (len(self.lines) - 1)

    def walk(self) -> Iterator[TreeBox]:
        """It and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def shift(self, by: float) -> None:
        for one in self.walk():
            one.y += by


def svg_tree(trace: Trace, where: TraceSelection) -> str:
    """The tree of one request, as far as the step."""
    assert where.request is not None
    asked, planned = trace.requests[where.request], layout_tree(trace, where)
    root = _make_box(trace, planned, planned.root, 0, _last_folded_level(planned))
    _place_vertically(root, BOX_GAP if asked.demands is None else BOX_GAP + 6)
    spots = list(root.walk())
    right = _place_columns(spots)
    highest = min(one.y - one.height / 2 for one in spots)
    root.shift(TOP - highest)
    lowest = max(one.y + one.height / 2 for one in spots)
    tree = [
        *(_draw_edges(one, asked) for one in reversed(spots)),
        *(_draw_box(trace, one, asked) for one in spots),
    ]
    below, wide, high = _draw_legend(asked, spots, lowest + 30)
    width = max(right + MARGIN, wide + MARGIN, 360)
    heading = [text(asked.method, MARGIN, 32, "s big ink"), caption(layout_summary(planned), MARGIN, 49)]
    return svg_document(
        [*heading, *tree, *below], width, high + 16, f"Tree of {asked.method}", _describe_tree(trace, planned)
    )


# ------------------------------------------------------------------------ places
def _last_folded_level(planned: TreeLayout) -> int:
    """The last column of joined tokens, after which tokens have columns by their depth."""

    def deepest(branch: Branch, level: int) -> int:
        if branch.last_node.depth > planned.folded_depth:
            return 0
        return max([level, *(deepest(one, level + 1) for one in branch.children)])

    return deepest(planned.root, 0)


def _make_box(trace: Trace, planned: TreeLayout, branch: Branch, level: int, base: int) -> TreeBox:
    single = branch.last_node.depth > planned.folded_depth
    if single:
        level = base + branch.last_node.depth - planned.folded_depth
    run = UNFORKED_CELLS if planned.root.num_levels() == 2 and not planned.num_hidden else RUN_CELLS
    spot = TreeBox(branch, _box_lines(trace, branch, single, run), level, branch.label)
    spot.children = [_make_box(trace, planned, one, level + 1, base) for one in branch.children]
    return spot


def _box_lines(trace: Trace, branch: Branch, single: bool, run: int) -> list[list[TextPiece]]:
    node = branch.last_node
    if node.token is None:
        prompt = text_pieces(trace, trace.requests[node.request].prompt[-PROMPT_CELLS:])
        said = join_pieces(prompt)
        kept = said if pieces_width(prompt) <= PROMPT_CELLS else "…" + _text_tail(said, PROMPT_CELLS - 1)
        return [[(kept, False)] if kept else [("start", True)]]
    tokens = [one.token for one in branch.nodes if one.token is not None]
    pieces = text_pieces(trace, tokens, mark_spaces=True)
    if single and len(tokens) == 1:
        return [clip_pieces(pieces, TOKEN_CELLS)]
    lines = wrap_pieces(pieces, run)
    if len(lines) > MAX_RUN_LINES:
        left_out = [(f"⋯ {pluralize(len(tokens), 'token')} ⋯", True)]
        lines = [*lines[: MAX_RUN_LINES - 3], left_out, *lines[-2:]]
    return lines


def _text_tail(said: str, width: int) -> str:
    """The last so many cells of a text, from the beginning of a word if there is one."""
    kept = said[-width:]  # of which every character takes a cell, or none
    while pieces_width([(kept, False)]) > width:
        kept = kept[1:]
    _, space, whole = kept.partition(" ")
    return whole if space and whole.strip() else kept


def _place_vertically(spot: TreeBox, apart: float) -> dict[int, tuple[float, float]]:
    """Put all below a spot around it; the highest and the lowest of every column.

    The main line stays level. Each further branch goes above or below all that is there, whichever is
    nearer, so that no two edges cross.
    """
    taken = {spot.level: (spot.y - spot.height / 2, spot.y + spot.height / 2)}
    for at, child in enumerate(spot.children):
        child.y = spot.y
        own = _place_vertically(child, apart)
        shared = [level for level in own if level in taken]
        if at and shared:
            up = min(taken[level][0] - own[level][1] for level in shared) - apart
            down = max(taken[level][1] - own[level][0] for level in shared) + apart
            by = down if down <= -up else up
            child.shift(by)
            own = {level: (top + by, bottom + by) for level, (top, bottom) in own.items()}
        for level, (top, bottom) in own.items():
            before = taken.get(level, (top, bottom))
            taken[level] = (min(before[0], top), max(before[1], bottom))
    return taken


def _place_columns(spots: Sequence[TreeBox]) -> float:
    """Give every spot its place across; where the last of them ends."""
    right, edge = 0.0, MARGIN
    for level in range(max(one.level for one in spots) + 1):
        here = [one for one in spots if one.level == level]
        if level:
            edge += EDGE_CURVE + EDGE_TAIL if any(one.label for one in here) else UNSCORED_EDGE
        wide = 0.0
        for one in here:
            one.x = edge
            wide = max(wide, one.width + (len(_end_note(one)) * 6.4 + 8 if _end_note(one) else 0))
        edge += wide
        right = max(right, edge)
    return right


# ------------------------------------------------------------------------ marks
def _draw_edges(spot: TreeBox, asked: RequestRecord) -> str:
    """The edges to what follows a spot, with their scores; the best last, above the others."""
    parts = []
    for child in reversed(spot.children):
        start, end = spot.x + spot.width, child.x
        bend = end - (EDGE_TAIL if child.label else 6)
        # Level as far as its own column goes, so that it passes no box, and then to its child.
        turn = max(bend - EDGE_CURVE, start)
        half = (turn + bend) / 2
        curve = (
            f"M{start:.1f} {spot.y:.1f}H{turn:.1f}C{half:.1f} {spot.y:.1f} {half:.1f} {child.y:.1f} "
            f"{bend:.1f} {child.y:.1f}H{end:.1f}"
        )
        kind, width = _stroke_style(child, asked)
        parts.append(path(curve, kind, width))
        if child.label:
            weight = f"{_best_text_class(child, asked)} bold" if child.branch.state == "best" else "faint"
            parts.append(text(child.label, end - 4, child.y - 5, f"small {weight}", "end"))
        if asked.groups > 1:
            group = child.branch.last_node.group
            weight = "faint" if kind == "rule dash" else f"bold f{group % NUM_GROUP_COLOURS}"
            parts.append(text(group_letter(group), end - 5, child.y + 12.5, f"small {weight}", "end"))
    return element("g", *parts) if parts else ""


def _stroke_style(spot: TreeBox, asked: RequestRecord) -> tuple[str, float]:
    """The class and the width of the lines of a spot."""
    state = spot.branch.state
    if state == "dropped" and not spot.branch.leads_to_end:
        return "rule dash", 1
    if state in ("dropped", "ended"):
        return "rule", 1.2
    own = f"g{spot.branch.last_node.group % NUM_GROUP_COLOURS}" if asked.groups > 1 else "strong"
    return own, 2.4 if state == "best" else 1.2


def _best_text_class(spot: TreeBox, asked: RequestRecord) -> str:
    """The class of the letters of what was best."""
    return f"f{spot.branch.last_node.group % NUM_GROUP_COLOURS}" if asked.groups > 1 else "accent"


def _draw_box(trace: Trace, spot: TreeBox, asked: RequestRecord) -> str:
    branch, node = spot.branch, spot.branch.last_node
    x, top = spot.x, spot.y - spot.height / 2
    if node.token is None:
        return titled_group(
            "prompt",
            box(x, top, spot.width, spot.height, "sheet"),
            text(spot.lines[0], x + spot.width / 2, spot.y + 4.5, "quiet", "middle"),
            data_node=node.number,
        )
    best = branch.state == "best"
    kind, width = _stroke_style(spot, asked)
    fill = "hole" if not best else "wash" if asked.groups == 1 else "sheet"
    parts = [box(x, top, spot.width, spot.height, f"{fill} {kind}", stroke_width=min(width, 1.6))]
    weight = "ink bold" if best else "ink" if branch.state in ("returned", "alive") else "quiet"
    for at, letters in enumerate(spot.lines):
        parts.append(text(letters, x + spot.width / 2, top + 17 + LINE_PITCH * at, weight, "middle"))
    if node.is_draft and len(branch.nodes) == 1:
        parts.append(line(x + PADDING, top + 21, x + spot.width - PADDING, top + 21, "right dots", 1.5))
    if met := constraint_progress(trace, node):
        parts.append(text(f"◆{met}", x + spot.width - 3, top - 2.5, "small warm bold", "end"))
    if note := _end_note(spot):
        parts.append(
            caption(
                note,
                x + spot.width + 7,
                spot.y + 4,
                f"{_best_text_class(spot, asked)} bold" if best else "quiet",
            )
        )
    said = [one for each in branch.nodes[-1:] for one in tooltip_lines(trace, each, branch.state)]
    return titled_group(
        said,
        *parts,
        data_node=node.number,
        data_token=node.token,
        data_state=branch.state,
        data_score=None if node.score is None else repr(node.score),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _end_note(spot: TreeBox) -> str:
    """What stands behind the last box of a sequence."""
    return ending_label(spot.branch.last_node) if not spot.branch.children else ""


# ------------------------------------------------------------------------ words around it
def _draw_legend(asked: RequestRecord, spots: Sequence[TreeBox], y: float) -> tuple[list[str], float, float]:
    """The signs that are there and what they mean; with it how wide and how low they come."""
    present = {one.branch.state for one in spots if one.branch.last_node.token is not None}
    x, parts = MARGIN, list[str]()
    for state, name in STATE_LABELS.items():
        if state not in present:
            continue
        mark = {"dropped": "rule dash", "ended": "rule"}.get(state, "strong" if asked.groups == 1 else "firm")
        kind = "hole" if state != "best" else "wash" if asked.groups == 1 else "sheet"
        parts += [
            box(x, y - 10, 18, 12, f"{kind} {mark}", stroke_width=1.6 if state == "best" else 1.1, rx=4),
            caption(name, x + 24, y),
        ]
        x += 24 + len(name) * 6.2 + 18
    extra = []
    if any(one.branch.last_node.score is not None for one in spots):
        extra.append("on the edges: summed log-probability, at an end as it was ranked")
    elif any(one.label for one in spots):
        extra.append("on the edges: probability")
    if asked.groups > 1:
        extra.append("letters: groups of beams")
    if any(one.branch.last_node.met is not None for one in spots):
        extra.append("◆ tokens of the constraints that are met")
    if any(one.branch.last_node.is_draft for one in spots):
        extra.append("dotted: guessed ahead")
    for at, said in enumerate(extra):
        parts.append(caption(said, MARGIN, y + 20 + 17 * at))
    wide = max([x, *(MARGIN + len(said) * 6.2 for said in extra)])
    return parts, wide, y + 17 * len(extra) + 4


def _describe_tree(trace: Trace, planned: TreeLayout) -> str:
    """The tree in a sentence, for those who do not see it."""
    ends = [one for one in planned.root.walk() if not one.children and one.last_node.token is not None]
    told = []
    for end in ends:
        if end.state in ("best", "returned", "alive", "ended"):
            tokens = [
                node.token for node in trace.tree.path_to(end.last_node.number) if node.token is not None
            ]
            score = "" if end.last_node.score is None else f", score {format_score(end.last_node.score)}"
            told.append(
                f"{STATE_LABELS[end.state]}{score}: {join_pieces(text_pieces(trace, tokens)).strip()}"
            )
    dropped = sum(one.state == "dropped" for one in ends)
    return ". ".join([*told, f"{pluralize(dropped, 'branch', 'branches')} dropped"])
