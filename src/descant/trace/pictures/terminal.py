"""Pictures of a trace for a terminal: lines of text, cut to its width, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from descant.tokenization.display import TextPiece, escape_invisible, join_pieces
from descant.trace.pictures.cells import (
    cell_width,
    clip_pieces,
    fit_text,
    format_percent,
    pieces_width,
    pluralize,
    probability,
    wrap_pieces,
)
from descant.trace.pictures.text import (
    MAX_DRAWN_TOKENS,
    SHADE_LEVELS,
    drawn_text,
    entropy_scale,
    layout_tokens,
    node_tokens,
    shade_level,
)
from descant.trace.pictures.tree_layout import Branch, layout_summary, layout_tree
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
    group_letter,
    tokens_with_notes,
)
from descant.trace.records import RequestRecord, TokenShift
from descant.trace.trace_data import Node, TraceData, TraceSelection, text_pieces, token_pieces

StyledText = tuple[str, str]  # text, and style names separated by spaces

NUM_GROUP_COLOURS: Final = 8
_GROUP_COLOURS: Final = (33, 166, 35, 134, 168, 142, 38, 137)
_SHADE_COLOURS: Final = (230, 222, 215, 208)  # darker for less likely tokens; their text is black
_ANSI_STYLES: Final = {
    "bold": "1",
    "dim": "2",
    "under": "4",
    "gone": "9",
    "accent": "38;5;33",
    "good": "38;5;35",
    "bad": "38;5;167",
    "warm": "38;5;172",
    **{f"g{at}": f"38;5;{colour}" for at, colour in enumerate(_GROUP_COLOURS)},
    **{f"shade{at}": f"38;5;16;48;5;{colour}" for at, colour in enumerate(_SHADE_COLOURS, 1)},
}
_SHADE_MARKS: Final = " ░▒▓█"  # shades without colours
_ENTROPY_BARS: Final = "▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_REJECTED_MARK, _ACCEPTED_MARK = "✗", "━"
_COLUMN_SEPARATOR: Final = " │ "
_GUTTER, _NAME_CELLS, _PERCENT_CELLS = 2, 22, 9
_MAX_TOKEN_CELLS: Final = 16  # of a choice


class TerminalCanvas:
    """Rows of styled text for a terminal of some width, with colours or without."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width, self.colour = width, colour
        self.rows: list[Sequence[StyledText]] = []

    def lines(self) -> str:
        """The rows as text, each cut to the width."""
        return "\n".join(map(self._line, self.rows)).rstrip("\n")

    def _line(self, row: Sequence[StyledText]) -> str:
        cells_left, line = max(self.width, 0), ""
        for letters, style in row:
            pieces = escape_invisible(letters)
            clipped = clip_pieces(pieces, cells_left)
            shown = join_pieces(clipped)
            codes = ";".join(_ANSI_STYLES[name] for name in style.split() if name in _ANSI_STYLES)
            line += f"\x1b[{codes}m{shown}\x1b[0m" if codes and self.colour and shown else shown
            cells_left -= cell_width(shown)
            if clipped and clipped[-1] == ("…", True) and clipped != pieces:
                break
        return line if self.colour else line.rstrip(" ")

    def wrap(self, text: str, style: str = "dim") -> None:
        """A text wrapped to the width."""
        lines = wrap_pieces(escape_invisible(text), max(self.width, 1))
        self.rows += [[(join_pieces(line), style)] for line in lines]

    def heading(self, title: str, details: Sequence[str]) -> None:
        """A title and details."""
        self.wrap(title, "bold")
        self.wrap(", ".join(details))
        self.rows.append([])

    # -------------------------------------------------------------------- texts
    def shaded_text(self, selection: TraceSelection) -> None:
        """The end of the prompt, and tokens shaded by probability with the entropy of their choice."""
        tokens, nodes = drawn_text(selection)
        max_entropy = entropy_scale(nodes)
        for line in layout_tokens(tokens, max(self.width - _GUTTER, 1)):
            marked = [(token, nodes[token.index]) for token in line]
            letters = [(join_pieces(token.pieces), _shade(node)) for token, node in marked]
            shades = [(_shade_mark(node) * token.width, "") for token, node in marked]
            bars = [(_entropy_bar(node, max_entropy) * token.width, "dim") for token, node in marked]
            self.rows.append([("  ", ""), *letters])
            if any(node is not None for _, node in marked):
                self.rows += [] if self.colour else [[("p ", ""), *shades]]
                self.rows.append([("H ", "dim"), *bars])
        self.rows.append([])
        self._shade_legend()
        self.wrap(f"H: entropy of the choice, {_ENTROPY_BARS[-1]} is {max_entropy:.1f} nats")

    def _shade_legend(self) -> None:
        row: list[StyledText] = [] if self.colour else [("p:", "dim")]
        for level, (_, name) in enumerate(SHADE_LEVELS):
            label = f" {name} " if self.colour else f" {_SHADE_MARKS[level] if level else 'blank'} {name}  "
            if row and sum(cell_width(span) for span, _ in row) + cell_width(label) > self.width:
                self.rows.append(row)
                row = []
            row.append((label, f"shade{level}" if level else "dim"))
        self.rows.append(row)

    def compared_texts(self, comparison: RunComparison) -> None:
        """Two texts side by side, from where they differ shaded by probability."""
        cells = max((self.width - cell_width(_COLUMN_SEPARATOR)) // 2, 1)
        texts = (_compared_text(run, comparison.num_shared_tokens, cells) for run in comparison.runs)
        for left, right in zip_longest(*texts, fillvalue=()):
            gap = " " * (cells - sum(cell_width(span) for span, _ in left))
            self.rows.append([*left, (gap, ""), (_COLUMN_SEPARATOR, "dim"), *right])

    def drafted_text(self, trace: TraceData, nodes: Sequence[Node], notes: dict[int, DraftedForward]) -> None:
        """Tokens with their drafts marked; `notes` has rejected drafts by the node that they stand below."""
        texts = {
            number: _REJECTED_MARK + join_pieces(note.rejection_pieces(trace))
            for number, note in notes.items()
        }
        tokens = tokens_with_notes(
            trace, nodes, {number: cell_width(text) + 1 for number, text in texts.items()}
        )
        for line in layout_tokens(tokens, max(self.width, 1)):
            drafts = [nodes[token.index].is_draft for token in line]
            row = [
                (fit_text(join_pieces(token.pieces), token.width), "good under" * draft)
                for token, draft in zip(line, drafts, strict=True)
            ]
            self.rows.append(row)
            if not self.colour and any(drafts):
                marks = (
                    (_ACCEPTED_MARK if draft else " ") * token.width
                    for token, draft in zip(line, drafts, strict=True)
                )
                self.rows.append([("".join(marks), "")])
            below, end = list[StyledText](), 0
            for token in line:
                if note := texts.pop(nodes[token.index].number, ""):
                    column = max(min(token.column, self.width - cell_width(note)), end)
                    below += [(" " * (column - end), ""), (note, "bad")]
                    end = column + cell_width(note)
            self.rows += [below] if below else []
        accepted = "underlined" if self.colour else _ACCEPTED_MARK
        self.rows.append([])
        self.wrap(
            f"{accepted} guessed, and it stood   {_REJECTED_MARK} guessed there instead, +n more behind it"
        )

    # -------------------------------------------------------------------- tables and bars
    def table(self, title: str, rows: Sequence[ComparisonRow]) -> None:
        """Names with the values of two runs."""
        cells = max((self.width - _NAME_CELLS) // 2, 1)
        if rows:
            head = [(fit_text(title, _NAME_CELLS), "bold"), (fit_text("A", cells), "accent"), ("B", "accent")]
            self.rows += [[], head]
        for row in rows:
            name, first, second = (join_pieces(escape_invisible(cell)) for cell in row)
            self.rows.append(
                [
                    (fit_text(name, _NAME_CELLS - 2) + "  ", "dim"),
                    (fit_text(first, cells - 1) + " ", ""),
                    (second, ""),
                ]
            )

    def choice(self, view: ChoiceView) -> None:
        """A choice in its context, and the effect of each processor on it."""
        context = text_pieces(view.trace, view.context_tokens)
        self.rows += [
            [("… ", "dim"), (join_pieces(clip_pieces(context, max(self.width - 2, 1))), "dim")],
            [("→ ", "accent"), (join_pieces(token_pieces(view.trace, view.token, True)), "bold")],
        ]
        token_cells = min(_MAX_TOKEN_CELLS, max(self.width // 4, 4))
        bar_cells = max((self.width - 2 - token_cells - 2 * _PERCENT_CELLS - 2) // 2, 0)
        before = f"{'':{2 + token_cells}}{'before':>{_PERCENT_CELLS}} "
        head = f"{before}{' ' * bar_cells}{'after':>{_PERCENT_CELLS}}"
        for panel in view.panels:
            self.rows += [[], [(panel.name, "bold"), (f"  {panel.note}", "dim")], [(head, "dim")]]
            self.rows += [_shift_bars(view, shift, token_cells, bar_cells) for shift in panel.bars]

    def draft_chart(self, stats: Sequence[DraftPositionStats]) -> None:
        """Acceptance by draft position."""
        if stats:
            self.rows += [[], [("guesses that stood, by position", "bold")]]
        for number, position in enumerate(stats, 1):
            rate = position.num_accepted / position.num_drafts
            note = f" {100 * rate:3.0f} %  {position.num_accepted} of {position.num_drafts}"
            bar_cells = max(min(self.width - 4 - cell_width(note), 40), 0)
            self.rows.append(
                [(f"{number:>3} ", "dim"), (horizontal_bar(rate, bar_cells), "good"), (note, "")]
            )


def horizontal_bar(value: float, width: int) -> str:
    """A bar of `width` cells for the value 1; any positive value is visible."""
    eighths = round(min(max(value, 0.0), 1.0) * width * 8)
    eighths = max(eighths, 1) if value > 0 and width else eighths
    full_cells, rest = divmod(eighths, 8)
    return fit_text("█" * full_cells + (_EIGHTHS[rest] if rest else ""), width)


def _shade(node: Node | None) -> str:
    """The style of a token by its probability."""
    level = None if node is None else shade_level(node)
    return "dim" if level is None else f"shade{level}" if level else ""


def _shade_mark(node: Node | None) -> str:
    level = None if node is None else shade_level(node)
    return " " if level is None else _SHADE_MARKS[level]


def _entropy_bar(node: Node | None, max_entropy: float) -> str:
    if node is None or node.choice is None:
        return " "
    level = int(max(node.choice.entropy, 0.0) / max_entropy * len(_ENTROPY_BARS))
    return _ENTROPY_BARS[min(level, len(_ENTROPY_BARS) - 1)]


def _compared_text(run: ComparedRun, num_shared: int, cells: int) -> list[list[StyledText]]:
    """The lines of one of two texts, what they share dimmed."""
    title = join_pieces(clip_pieces(escape_invisible(f"{run.name}  {run.request.method}"), cells))
    return [[(title, "bold")], []] + [
        [
            (join_pieces(token.pieces), "dim" if token.index < num_shared else _shade(run.nodes[token.index]))
            for token in line
        ]
        for line in layout_tokens(node_tokens(run.trace, run.nodes[:MAX_DRAWN_TOKENS]), cells)
    ]


def _shift_bars(view: ChoiceView, shift: TokenShift, token_cells: int, bar_cells: int) -> list[StyledText]:
    """The probability of a token before and after a processor."""
    before, after = probability(shift.before), probability(shift.after)
    taken, removed = shift.token == view.token, after == 0.0 < before
    pieces = clip_pieces(token_pieces(view.trace, shift.token, True), token_cells)
    padding = " " * (token_cells - pieces_width(pieces))
    percent = "cut" if removed else format_percent(shift.after)
    return [
        ("→ " if taken else "  ", "accent"),
        (join_pieces(pieces) + padding, "bold" if taken else "dim gone" if removed else ""),
        (f"{format_percent(shift.before):>{_PERCENT_CELLS}} ", ""),
        (horizontal_bar(before / view.max_probability, bar_cells), "dim"),
        (f"{percent:>{_PERCENT_CELLS}} ", "bad" if removed else ""),
        ("" if removed else horizontal_bar(after / view.max_probability, bar_cells), "accent"),
    ]


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
    behind = "".join(_RAIL_BELOW.get(part, " ") for part in hook)
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
    return [note for note in notes if note]


def _branch_style(branch: Branch, request: RequestRecord) -> str:
    if branch.state == "dropped" and not branch.leads_to_end:
        return "dim"
    colour = f"g{branch.last_node.group % NUM_GROUP_COLOURS}" if request.groups > 1 else "accent"
    if branch.state == "best":
        return f"bold {colour}"
    return colour if branch.state == "returned" else ""
