"""The SVG file of a picture that grows downwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeVar

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.cells import cell_width, clip_pieces, pieces_width, probability
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.svg.elements import (
    CELL_WIDTH,
    box,
    caption,
    element,
    line,
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
from descant.trace.pictures.views import (
    ChoiceView,
    ComparedRun,
    ComparisonRow,
    DraftedForward,
    DraftPositionStats,
    RunComparison,
    format_shift,
    token_label,
    tokens_with_notes,
    tooltip_lines,
)
from descant.trace.records import TokenShift
from descant.trace.trace_data import TraceData, text_pieces, token_pieces
from descant.trace.tree import Node

__all__ = ["SvgCanvas"]

AnyNode = TypeVar("AnyNode", bound=Node | None)

MARGIN: Final = 22.0
LINE_CELLS: Final = 84  # width of a line
WIDTH: Final = LINE_CELLS * CELL_WIDTH + 2 * MARGIN
TOKEN_HEIGHT, BASELINE = 20.0, 14.5
MAX_ENTROPY_HEIGHT: Final = 13.0
COLUMN_CELLS, GAP_CELLS = 40, 4  # of two texts, and between them
NOTE_SCALE: Final = 0.82  # font size of a rejected draft relative to a token
CHOICE_CELLS, FIGURES_WIDTH = 16, 130.0  # of a token and of its probabilities
NUM_CONTEXT_TOKENS: Final = 10  # tokens shown before a choice
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
        context = clip_pieces(text_pieces(view.trace, view.context_tokens[-NUM_CONTEXT_TOKENS:]), 60)
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
