"""Pictures of a trace as SVG files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.pictures.cells import (
    cell_width,
    clip_pieces,
    format_score,
    pieces_width,
    pluralize,
    probability,
    wrap_pieces,
)
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
from descant.trace.pictures.text import (
    MAX_DRAWN_TOKENS,
    SHADE_LEVELS,
    LayoutToken,
    PlacedToken,
    drawn_text,
    entropy_scale,
    layout_tokens,
    node_tokens,
    shade_level,
)
from descant.trace.pictures.tree_layout import Branch, TreeLayout, layout_summary, layout_tree
from descant.trace.pictures.views import (
    STATE_LABELS,
    ChoiceView,
    ComparedRun,
    ComparisonRow,
    DraftedForward,
    DraftPositionStats,
    RunComparison,
    constraint_progress,
    ending_label,
    format_shift,
    group_letter,
    token_label,
    tokens_with_notes,
    tooltip_lines,
)
from descant.trace.records import RequestRecord, TokenShift
from descant.trace.trace_data import Node, TraceData, TraceSelection, text_pieces, token_pieces

AnyNode = TypeVar("AnyNode", bound=Node | None)

MARGIN: Final = 22.0
LINE_CELLS: Final = 84  # width of a line
WIDTH: Final = LINE_CELLS * CELL_WIDTH + 2 * MARGIN
TOKEN_HEIGHT, BASELINE = 20.0, 14.5
MAX_ENTROPY_HEIGHT: Final = 13.0
COLUMN_CELLS, GAP_CELLS = 40, 4  # of two texts, and between them
NOTE_SCALE: Final = 0.82  # font size of a rejected draft relative to a token
CHOICE_CELLS, FIGURES_WIDTH = 16, 130.0  # of a token and of its probabilities
MAX_COLUMN_WIDTH, CHART_HEIGHT = 40.0, 78.0
_UNDERLINE_STYLES: Final = {
    1: ("shadow dots", 1.2),
    2: ("shadow dash", 1.2),
    3: ("shadow", 1.2),
    4: ("shadow", 2.2),
}


class SvgCanvas:
    """The parts of a picture one below the other; `_y` is where the next begins."""

    def __init__(self) -> None:
        self._body: list[str] = []
        self._y = 0.0

    def document(self, title: str, description: str) -> str:
        """The whole picture; screen readers read the description."""
        return svg_document(self._body, WIDTH, self._y, title, description)

    def heading(self, title: str, details: Sequence[str]) -> None:
        """A title and details."""
        self._body += [text(title, MARGIN, 32, "s big ink"), caption(", ".join(details), MARGIN, 50)]
        self._y = 72

    # -------------------------------------------------------------------- texts
    def shaded_text(self, selection: TraceSelection) -> None:
        """The end of the prompt, and tokens shaded by probability with the entropy of their choice."""
        tokens, nodes = drawn_text(selection)
        max_entropy = entropy_scale(nodes)
        for token, node, x, y in self._placed(tokens, nodes, LINE_CELLS, 42.0):
            if node is None:
                self._body.append(text(token.pieces, x, y + BASELINE, "quiet"))
            else:
                bars = _entropy_bars(node, token, x, y, max_entropy)
                self._body.append(_shaded_token(selection.trace, node, token, x, y, bars))
        self._shade_legend()
        note = f"below each token: the entropy of its choice, the tallest bar {max_entropy:.1f} nats"
        choices = [node.choice for node in nodes if node is not None and node.choice is not None]
        if any(choice.left != choice.entropy for choice in choices):
            note += " (grey: the model, blue: left after the processors)"
        self._body.append(caption(note, MARGIN, self._y))
        self._y += 18

    def compared_texts(self, comparison: RunComparison) -> None:
        """Two texts side by side, from where they differ shaded by probability."""
        top, ends = self._y, list[float]()
        for run, column in zip(comparison.runs, (0, COLUMN_CELLS + GAP_CELLS), strict=True):
            self._y = top
            self._compared_text(run, comparison.num_shared_tokens, MARGIN + column * CELL_WIDTH)
            ends.append(self._y)
        self._y = max(ends)
        middle = MARGIN + (COLUMN_CELLS + GAP_CELLS / 2) * CELL_WIDTH
        self._body.append(line(middle, top, middle, self._y, "frame"))
        self._shade_legend()
        if comparison.num_shared_tokens:
            note = "from here on they differ; before it, quiet, they are the same"
            self._body.append(line(MARGIN + 2, self._y - 11, MARGIN + 2, self._y + 3, "strong", 2))
            self._body.append(caption(note, MARGIN + 28, self._y))
        self._y += 36

    def _compared_text(self, run: ComparedRun, num_shared: int, x: float) -> None:
        """One of two texts, what they share in grey."""
        title, y = clip_pieces(escape_invisible(run.request.method), COLUMN_CELLS - 4), self._y
        self._body += [
            box(x, y, 18, 18, "wash", rx=4),
            text(run.name, x + 9, y + 13.5, "s bold accent note", "middle"),
            text(title, x + 26, y + 13.5, "s bold ink"),
        ]
        self._y += 28
        nodes, marked = run.nodes[:MAX_DRAWN_TOKENS], not num_shared
        for token, node, left, y in self._placed(node_tokens(run.trace, nodes), nodes, COLUMN_CELLS, 25.0, x):
            if token.index < num_shared:
                self._body.append(text(token.pieces, left, y + BASELINE, "quiet"))
                continue
            if not marked:
                self._body.append(line(left, y - 2, left, y + 22, "strong", 2))
            marked = True
            self._body.append(_shaded_token(run.trace, node, token, left, y))

    def drafted_text(self, trace: TraceData, nodes: Sequence[Node], notes: dict[int, DraftedForward]) -> None:
        """Tokens with their drafts marked; `notes` has rejected drafts by the node that they stand below."""
        cells = {
            number: math.ceil(pieces_width(note.rejection_pieces(trace)) * NOTE_SCALE) + 1
            for number, note in notes.items()
        }
        waiting = dict(notes)
        tokens = tokens_with_notes(trace, nodes, cells)
        for token, node, x, y in self._placed(tokens, nodes, LINE_CELLS, 40.0):
            width = pieces_width(token.pieces) * CELL_WIDTH
            bottom, title = y + TOKEN_HEIGHT - 1, tooltip_lines(trace, node, node.state)
            parts = [text(token.pieces, x, y + BASELINE, "ink")]
            if node.is_draft:
                parts.insert(0, box(x + 0.5, y, width - 1, TOKEN_HEIGHT, "calm", rx=3))
                parts.append(line(x + 2, bottom, x + width - 2, bottom, "right", 1.6))
            if note := waiting.pop(node.number, None):
                parts.append(_rejected_draft(trace, note, x, bottom + 12))
                title.append(f"guessed instead: {token_label(trace, note.rejected_drafts[0])}")
            marks = {"data_node": node.number, "data_token": node.token}
            if node.is_draft:
                marks["data_accepted"] = 1
            self._body.append(titled_group(title, *parts, **marks))
        y = self._y = self._y + 12
        self._body += [
            box(MARGIN, y - 11, 22, 14, "calm", rx=3),
            line(MARGIN + 2, y + 2, MARGIN + 20, y + 2, "right", 1.6),
            caption("guessed, and it stood", MARGIN + 28, y),
            caption("plain: the model's own choice", MARGIN + 172, y),
            text("guess", MARGIN + 358, y, "small bad gone"),
            caption("guessed there instead, +n more behind it", MARGIN + 398, y),
        ]
        self._y += 20

    def _placed(
        self,
        tokens: Sequence[LayoutToken],
        nodes: Sequence[AnyNode],
        cells: int,
        pitch: float,
        left: float = MARGIN,
    ) -> list[tuple[PlacedToken, AnyNode, float, float]]:
        """Tokens on lines of so many cells, with their nodes, x and y."""
        lines = layout_tokens(tokens, cells)
        placed = [
            (token, nodes[token.index], left + token.column * CELL_WIDTH, self._y + row * pitch)
            for row, line_tokens in enumerate(lines)
            for token in line_tokens
        ]
        self._y += max(len(lines), 1) * pitch
        return placed

    def _shade_legend(self) -> None:
        x, y = MARGIN, self._y + 14
        for level, (_, name) in enumerate(SHADE_LEVELS):
            self._body.append(box(x, y - 11, 22, 14, f"shade{level} frame", rx=3))
            if level:
                self._body.append(line(x + 2, y + 1, x + 20, y + 1, *_UNDERLINE_STYLES[level]))
            self._body.append(caption(name, x + 28, y))
            x += 28 + len(name) * 6.2 + 16
        self._y = y + 20

    # -------------------------------------------------------------------- tables and bars
    def table(self, title: str, rows: Sequence[ComparisonRow]) -> None:
        """Names with the values of two runs."""
        if not rows:
            return
        columns = MARGIN, MARGIN + 26 * CELL_WIDTH, MARGIN + 54 * CELL_WIDTH
        for head, x, kind in zip((title, "A", "B"), columns, ("ink", "accent", "accent"), strict=True):
            self._body.append(text(head, x, self._y, f"s bold {kind}"))
        self._body.append(line(MARGIN, self._y + 7, WIDTH - MARGIN, self._y + 7, "frame"))
        self._y += 24
        for row in rows:
            for cell, x, cells, kind in zip(row, columns, (25, 30, 32), ("quiet", "ink", "ink"), strict=True):
                self._body.append(
                    text(clip_pieces(escape_invisible(cell), cells), x, self._y, f"note {kind}")
                )
            self._y += 18
        self._y += 18

    def choice(self, view: ChoiceView) -> None:
        """A choice in its context, and the effect of each processor on it."""
        context = clip_pieces(text_pieces(view.trace, view.context_tokens), 60)
        taken = token_pieces(view.trace, view.token, True)
        self._body += [
            text([("… ", True), *context], MARGIN, self._y + 6, "quiet"),
            text([("→ ", True), *taken], MARGIN, self._y + 26, "ink bold"),
        ]
        self._y += 56
        for panel in view.panels:
            self._body += [
                text(panel.name, MARGIN, self._y, "s bold ink"),
                caption(panel.note, WIDTH - MARGIN, self._y, anchor="end"),
                line(MARGIN, self._y + 8, WIDTH - MARGIN, self._y + 8, "frame"),
            ]
            self._y += 16
            for bar in panel.bars:
                self._body.append(_shift_bars(view, bar, self._y))
                self._y += 23
            self._y += 26
        y = self._y - 1
        self._body += [
            box(MARGIN, y - 7, 22, 6, "bar", rx=2),
            caption("before", MARGIN + 28, y),
            box(MARGIN + 84, y - 7, 22, 6, "accent", rx=2),
            caption("after", MARGIN + 112, y),
            caption("→ taken", MARGIN + 160, y),
        ]
        self._y += 18

    def draft_chart(self, stats: Sequence[DraftPositionStats]) -> None:
        """Acceptance by draft position."""
        if not stats:
            return
        self._y += 14
        self._body.append(text("guesses that stood, by position", MARGIN, self._y, "s bold ink"))
        bottom = self._y + 26 + CHART_HEIGHT
        column = min(MAX_COLUMN_WIDTH, (LINE_CELLS * CELL_WIDTH) / len(stats))
        scale = CHART_HEIGHT / max(position.num_drafts for position in stats)
        for index, position in enumerate(stats):
            x, tried, stood = (
                MARGIN + index * column,
                scale * position.num_drafts,
                scale * position.num_accepted,
            )
            parts = [box(x + 3, bottom - tried, column - 6, tried, "sheet frame", rx=2)]
            if position.num_accepted:
                parts.append(box(x + 3, bottom - stood, column - 6, stood, "fine", rx=2))
            if column >= 30:
                rate = f"{100 * position.num_accepted / position.num_drafts:.0f} %"
                parts.append(text(rate, x + column / 2, bottom - tried - 5, "s small quiet", "middle"))
            if column >= 14:
                parts.append(text(str(index + 1), x + column / 2, bottom + 15, "s small quiet", "middle"))
            figures = {
                "data_position": index + 1,
                "data_tried": position.num_drafts,
                "data_stood": position.num_accepted,
            }
            title = f"guess {index + 1}: {position.num_accepted} of {position.num_drafts} stood"
            self._body.append(titled_group(title, *parts, **figures))
        self._body.append(line(MARGIN, bottom, MARGIN + column * len(stats), bottom, "rule"))
        self._y = bottom + 38


# ------------------------------------------------------------------------ tokens
def _shaded_token(
    trace: TraceData, node: Node, token: PlacedToken, x: float, y: float, children: Sequence[str] = ()
) -> str:
    """A token on its shade; the less likely it was, the stronger its underline."""
    level = shade_level(node)
    width = token.width * CELL_WIDTH
    parts = [] if not level else [box(x + 0.5, y, width - 1, TOKEN_HEIGHT, f"shade{level}", rx=3)]
    # Escaped pieces are not paler on a dark shade: they would be unreadable.
    pieces = [(letters, is_escaped and not level) for letters, is_escaped in token.pieces]
    parts.append(text(pieces, x, y + BASELINE, "ink" if level is not None else "quiet"))
    if level:
        bottom = y + TOKEN_HEIGHT - 1
        parts.append(line(x + 2, bottom, x + width - 2, bottom, *_UNDERLINE_STYLES[level]))
    return titled_group(
        tooltip_lines(trace, node, node.state),
        *parts,
        *children,
        data_node=node.number,
        data_token=node.token,
        data_raw=None if node.raw is None else repr(node.raw),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _entropy_bars(node: Node, token: PlacedToken, x: float, y: float, max_entropy: float) -> list[str]:
    """Bars of the entropy before and after the processors."""
    if node.choice is None:
        return []
    width, bars = max(token.width * CELL_WIDTH - 2, 2), list[str]()
    values: list[tuple[float, str, str | None]] = [(node.choice.entropy, "bar", None)]
    if node.choice.left != node.choice.entropy:
        values.append((node.choice.left, "accent", "0.55"))
    for value, kind, opacity in values:
        height = MAX_ENTROPY_HEIGHT * min(max(value, 0.0) / max_entropy, 1)
        if height >= 0.3:
            bars.append(box(x + 1, y + TOKEN_HEIGHT + 2, width, height, kind, rx=0, opacity=opacity))
    return bars


def _rejected_draft(trace: TraceData, note: DraftedForward, x: float, y: float) -> str:
    """The rejected draft token, struck through, and the number of unverified ones after it."""
    pieces = note.rejection_pieces(trace)
    x = min(x, MARGIN + (LINE_CELLS - pieces_width(pieces) * NOTE_SCALE) * CELL_WIDTH)
    count = pieces.pop()[0] if len(note.rejected_drafts) > 1 else ""
    struck = join_pieces(pieces)
    return element(
        "g",
        text([(struck, False)], x, y, "small bad gone"),
        text([(count, False)], x + cell_width(struck) * CELL_WIDTH * NOTE_SCALE, y, "small bad")
        if count
        else "",
        data_token=note.rejected_drafts[0],
        data_accepted=0,
    )


def _shift_bars(view: ChoiceView, shift: TokenShift, y: float) -> str:
    """The probability of a token before and after a processor."""
    left = MARGIN + 16 + CHOICE_CELLS * CELL_WIDTH
    scale = (WIDTH - MARGIN - FIGURES_WIDTH - left) / view.max_probability
    before, after = (max(scale * probability(log), 1) for log in (shift.before, shift.after))
    taken, removed = shift.token == view.token, probability(shift.after) == 0.0 < probability(shift.before)
    pieces = clip_pieces(token_pieces(view.trace, shift.token, True), CHOICE_CELLS)
    figures = format_shift(shift)
    parts = [
        text("→", MARGIN, y + 14, "accent bold") if taken else "",
        text(pieces, MARGIN + 14, y + 14, "gone faint" if removed else "ink bold" if taken else "ink"),
        box(left, y + 2, before, 8, "bar", rx=2),
        "" if removed else box(left, y + 11, after, 8, "accent", rx=2),
        text(figures, WIDTH - MARGIN, y + 14, "small bad" if removed else "small quiet", "end"),
    ]
    return titled_group(
        f"{token_label(view.trace, shift.token)}  {figures}{'  cut' if removed else ''}",
        *parts,
        data_token=shift.token,
        data_before=repr(shift.before),
        data_after=repr(shift.after),
    )


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
        """The width of its own box."""
        return max(max(map(pieces_width, self.lines), default=0) * CELL_WIDTH + 2 * PADDING, BOX_HEIGHT)

    @property
    def height(self) -> float:
        """The height of its own box."""
        return BOX_HEIGHT + LINE_PITCH * (len(self.lines) - 1)

    def walk(self) -> Iterator[TreeBox]:
        """This box and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def shift(self, by: float) -> None:
        """Move it down, with all that is below it."""
        for node_box in self.walk():
            node_box.y += by


def svg_tree(selection: TraceSelection) -> str:
    """The tree of one request, up to the selected step."""
    trace, request, layout = selection.trace, selection.request, layout_tree(selection)
    root = _make_box(trace, layout, layout.root, 0, _last_folded_level(layout))
    _place_vertically(root, BOX_GAP if request.demands is None else BOX_GAP + 6)
    boxes = list(root.walk())
    right = _place_columns(boxes)
    highest = min(node_box.y - node_box.height / 2 for node_box in boxes)
    root.shift(TOP - highest)
    lowest = max(node_box.y + node_box.height / 2 for node_box in boxes)
    tree = [
        *(_draw_edges(node_box, request) for node_box in reversed(boxes)),
        *(_draw_box(trace, node_box, request) for node_box in boxes),
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
        return max([level, *(deepest(child, level + 1) for child in branch.children)])

    return deepest(layout.root, 0)


def _make_box(trace: TraceData, layout: TreeLayout, branch: Branch, level: int, base: int) -> TreeBox:
    single = branch.last_node.depth > layout.folded_depth
    if single:
        level = base + branch.last_node.depth - layout.folded_depth
    run = UNFORKED_CELLS if layout.root.num_levels() == 2 and not layout.num_hidden else RUN_CELLS
    node_box = TreeBox(branch, _box_lines(trace, branch, single, run), level, branch.label)
    node_box.children = [_make_box(trace, layout, child, level + 1, base) for child in branch.children]
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
    tokens = [part.token for part in branch.nodes if part.token is not None]
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
    for level in range(max(node_box.level for node_box in boxes) + 1):
        column = [node_box for node_box in boxes if node_box.level == level]
        if level:
            edge += EDGE_CURVE + EDGE_TAIL if any(node_box.label for node_box in column) else UNSCORED_EDGE
        width = 0.0
        for node_box in column:
            node_box.x = edge
            width = max(
                width, node_box.width + (len(_end_note(node_box)) * 6.4 + 8 if _end_note(node_box) else 0)
            )
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
    return titled_group(
        tooltip_lines(trace, node, branch.state),
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
    present = {node_box.branch.state for node_box in boxes if node_box.branch.last_node.token is not None}
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
    if any(node_box.branch.last_node.score is not None for node_box in boxes):
        notes.append("on the edges: summed log-probability, at an end as it was ranked")
    elif any(node_box.label for node_box in boxes):
        notes.append("on the edges: probability")
    if request.groups > 1:
        notes.append("letters: groups of beams")
    if any(node_box.branch.last_node.met is not None for node_box in boxes):
        notes.append("◆ tokens of the constraints that are met")
    if any(node_box.branch.last_node.is_draft for node_box in boxes):
        notes.append("dotted: guessed ahead")
    for at, note in enumerate(notes):
        parts.append(caption(note, MARGIN, y + 20 + 17 * at))
    right = max([x, *(MARGIN + len(note) * 6.2 for note in notes)])
    return parts, right, y + 17 * len(notes) + 4


def _describe_tree(trace: TraceData, layout: TreeLayout) -> str:
    """The tree as text, for screen readers."""
    ends = [
        branch for branch in layout.root.walk() if not branch.children and branch.last_node.token is not None
    ]
    parts = []
    for end in ends:
        if end.state in ("best", "returned", "alive", "ended"):
            path_nodes = trace.tree.path_to(end.last_node.number)[-MAX_DESCRIBED_TOKENS:]
            tokens = [node.token for node in path_nodes if node.token is not None]
            score = "" if end.last_node.score is None else f", score {format_score(end.last_node.score)}"
            parts.append(
                f"{STATE_LABELS[end.state]}{score}: {join_pieces(text_pieces(trace, tokens)).strip()}"
            )
    dropped = sum(end.state == "dropped" for end in ends)
    return ". ".join([*parts, f"{pluralize(dropped, 'branch', 'branches')} dropped"])
