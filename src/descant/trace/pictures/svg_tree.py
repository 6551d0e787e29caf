"""The tree as SVG: every hypothesis from left to right, the best on a straight line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import Piece, plain
from descant.trace.pictures.drawing import (
    CELL,
    GROUPS,
    box,
    caption,
    document,
    element,
    line,
    path,
    text,
    titled,
)
from descant.trace.pictures.figures import points, several
from descant.trace.pictures.legend import STATES, ending, letter, progress, said_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_cells import clipped, width_of, wrapped
from descant.trace.pictures.tree_layout import Branch, Plan, counted, plan
from descant.trace.records import Asked
from descant.trace.token_text import phrase

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["svg_tree"]

MARGIN: Final = 22.0
TOP: Final = 62.0  # of the tree, below the heading
HEIGHT, LINE = 25.0, 17.0  # of a box with one line, and of each further line
PAD: Final = 8.0  # between a box and its letters
BEND, TAIL = 18.0, 38.0  # of an edge: its curve, and the straight end that has the score above it
SLIM: Final = 24.0  # an edge without a score
APART: Final = 9.0  # boxes of one column
WORD, RUN = 16, 22  # cells of a token, and of a line of joined tokens
ALONE: Final = 64  # cells of such a line where nothing forks
LINES: Final = 6  # of joined tokens
PROMPT: Final = 14  # cells of a prompt's end


@dataclass
class Spot:
    """A branch with its letters and its place."""

    branch: Branch
    lines: list[list[Piece]]
    level: int
    label: str  # the score on its edge
    children: list[Spot] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0  # of its middle

    @property
    def width(self) -> float:
        return max(max(map(width_of, self.lines), default=0) * CELL + 2 * PAD, HEIGHT)

    @property
    def height(self) -> float:
        return HEIGHT + LINE * (len(self.lines) - 1)

    def all(self) -> Iterator[Spot]:
        """It and all below it."""
        yield self
        for child in self.children:
            yield from child.all()

    def shift(self, by: float) -> None:
        for one in self.all():
            one.y += by


def svg_tree(trace: Trace, where: Where) -> str:
    """The tree of one request, as far as the step."""
    assert where.request is not None
    asked, planned = trace.requests[where.request], plan(trace, where)
    root = _spot(trace, planned, planned.root, 0, _base(planned))
    _settle(root, APART if asked.demands is None else APART + 6)
    spots = list(root.all())
    right = _columns(spots)
    highest = min(one.y - one.height / 2 for one in spots)
    root.shift(TOP - highest)
    lowest = max(one.y + one.height / 2 for one in spots)
    tree = [*(_edges(one, asked) for one in reversed(spots)), *(_box(trace, one, asked) for one in spots)]
    below, wide, high = _legend(asked, spots, lowest + 30)
    width = max(right + MARGIN, wide + MARGIN, 360)
    heading = [text(asked.method, MARGIN, 32, "s big ink"), caption(counted(planned), MARGIN, 49)]
    return document(
        [*heading, *tree, *below], width, high + 16, f"Tree of {asked.method}", _told(trace, planned)
    )


# ------------------------------------------------------------------------ places
def _base(planned: Plan) -> int:
    """The last column of joined tokens, after which tokens have columns by their depth."""

    def deepest(branch: Branch, level: int) -> int:
        if branch.last.depth > planned.single:
            return 0
        return max([level, *(deepest(one, level + 1) for one in branch.children)])

    return deepest(planned.root, 0)


def _spot(trace: Trace, planned: Plan, branch: Branch, level: int, base: int) -> Spot:
    single = branch.last.depth > planned.single
    if single:
        level = base + branch.last.depth - planned.single
    run = ALONE if planned.root.levels() == 2 and not planned.hidden else RUN
    spot = Spot(branch, _letters(trace, branch, single, run), level, branch.label)
    spot.children = [_spot(trace, planned, one, level + 1, base) for one in branch.children]
    return spot


def _letters(trace: Trace, branch: Branch, single: bool, run: int) -> list[list[Piece]]:
    node = branch.last
    if node.token is None:
        prompt = phrase(trace, trace.requests[node.request].prompt[-PROMPT:])
        said = plain(prompt)
        kept = said if width_of(prompt) <= PROMPT else "…" + _ending(said, PROMPT - 1)
        return [[(kept, False)] if kept else [("start", True)]]
    tokens = [one.token for one in branch.nodes if one.token is not None]
    pieces = phrase(trace, tokens, spaces=True)
    if single and len(tokens) == 1:
        return [clipped(pieces, WORD)]
    lines = wrapped(pieces, run)
    if len(lines) > LINES:
        left_out = [(f"⋯ {several(len(tokens), 'token')} ⋯", True)]
        lines = [*lines[: LINES - 3], left_out, *lines[-2:]]
    return lines


def _ending(said: str, width: int) -> str:
    """The last so many cells of a text, from the beginning of a word if there is one."""
    kept = said[-width:]  # of which every character takes a cell, or none
    while width_of([(kept, False)]) > width:
        kept = kept[1:]
    _, space, whole = kept.partition(" ")
    return whole if space and whole.strip() else kept


def _settle(spot: Spot, apart: float) -> dict[int, tuple[float, float]]:
    """Put all below a spot around it; the highest and the lowest of every column.

    The main line stays level. Each further branch goes above or below all that is there, whichever is
    nearer, so that no two edges cross.
    """
    taken = {spot.level: (spot.y - spot.height / 2, spot.y + spot.height / 2)}
    for at, child in enumerate(spot.children):
        child.y = spot.y
        own = _settle(child, apart)
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


def _columns(spots: Sequence[Spot]) -> float:
    """Give every spot its place across; where the last of them ends."""
    right, edge = 0.0, MARGIN
    for level in range(max(one.level for one in spots) + 1):
        here = [one for one in spots if one.level == level]
        if level:
            edge += BEND + TAIL if any(one.label for one in here) else SLIM
        wide = 0.0
        for one in here:
            one.x = edge
            wide = max(wide, one.width + (len(_note(one)) * 6.4 + 8 if _note(one) else 0))
        edge += wide
        right = max(right, edge)
    return right


# ------------------------------------------------------------------------ marks
def _edges(spot: Spot, asked: Asked) -> str:
    """The edges to what follows a spot, with their scores; the best last, above the others."""
    parts = []
    for child in reversed(spot.children):
        start, end = spot.x + spot.width, child.x
        bend = end - (TAIL if child.label else 6)
        # Level as far as its own column goes, so that it passes no box, and then to its child.
        turn = max(bend - BEND, start)
        half = (turn + bend) / 2
        curve = (
            f"M{start:.1f} {spot.y:.1f}H{turn:.1f}C{half:.1f} {spot.y:.1f} {half:.1f} {child.y:.1f} "
            f"{bend:.1f} {child.y:.1f}H{end:.1f}"
        )
        kind, width = _stroke(child, asked)
        parts.append(path(curve, kind, width))
        if child.label:
            weight = f"{_ink(child, asked)} bold" if child.branch.state == "best" else "faint"
            parts.append(text(child.label, end - 4, child.y - 5, f"small {weight}", "end"))
        if asked.groups > 1:
            group = child.branch.last.group
            weight = "faint" if kind == "rule dash" else f"bold f{group % GROUPS}"
            parts.append(text(letter(group), end - 5, child.y + 12.5, f"small {weight}", "end"))
    return element("g", *parts) if parts else ""


def _stroke(spot: Spot, asked: Asked) -> tuple[str, float]:
    """The class and the width of the lines of a spot."""
    state = spot.branch.state
    if state == "dropped" and not spot.branch.leads:
        return "rule dash", 1
    if state in ("dropped", "ended"):
        return "rule", 1.2
    own = f"g{spot.branch.last.group % GROUPS}" if asked.groups > 1 else "strong"
    return own, 2.4 if state == "best" else 1.2


def _ink(spot: Spot, asked: Asked) -> str:
    """The class of the letters of what was best."""
    return f"f{spot.branch.last.group % GROUPS}" if asked.groups > 1 else "accent"


def _box(trace: Trace, spot: Spot, asked: Asked) -> str:
    branch, node = spot.branch, spot.branch.last
    x, top = spot.x, spot.y - spot.height / 2
    if node.token is None:
        return titled(
            "prompt",
            box(x, top, spot.width, spot.height, "sheet"),
            text(spot.lines[0], x + spot.width / 2, spot.y + 4.5, "quiet", "middle"),
            data_node=node.number,
        )
    best = branch.state == "best"
    kind, width = _stroke(spot, asked)
    fill = "hole" if not best else "wash" if asked.groups == 1 else "sheet"
    parts = [box(x, top, spot.width, spot.height, f"{fill} {kind}", stroke_width=min(width, 1.6))]
    weight = "ink bold" if best else "ink" if branch.state in ("returned", "alive") else "quiet"
    for at, letters in enumerate(spot.lines):
        parts.append(text(letters, x + spot.width / 2, top + 17 + LINE * at, weight, "middle"))
    if node.guessed and len(branch.nodes) == 1:
        parts.append(line(x + PAD, top + 21, x + spot.width - PAD, top + 21, "right dots", 1.5))
    if met := progress(trace, node):
        parts.append(text(f"◆{met}", x + spot.width - 3, top - 2.5, "small warm bold", "end"))
    if note := _note(spot):
        parts.append(
            caption(note, x + spot.width + 7, spot.y + 4, f"{_ink(spot, asked)} bold" if best else "quiet")
        )
    said = [one for each in branch.nodes[-1:] for one in said_of(trace, each, branch.state)]
    return titled(
        said,
        *parts,
        data_node=node.number,
        data_token=node.token,
        data_state=branch.state,
        data_score=None if node.score is None else repr(node.score),
        data_processed=None if node.processed is None else repr(node.processed),
    )


def _note(spot: Spot) -> str:
    """What stands behind the last box of a sequence."""
    return ending(spot.branch.last) if not spot.branch.children else ""


# ------------------------------------------------------------------------ words around it
def _legend(asked: Asked, spots: Sequence[Spot], y: float) -> tuple[list[str], float, float]:
    """The signs that are there and what they mean; with it how wide and how low they come."""
    present = {one.branch.state for one in spots if one.branch.last.token is not None}
    x, parts = MARGIN, list[str]()
    for state, name in STATES.items():
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
    if any(one.branch.last.score is not None for one in spots):
        extra.append("on the edges: summed log-probability, at an end as it was ranked")
    elif any(one.label for one in spots):
        extra.append("on the edges: probability")
    if asked.groups > 1:
        extra.append("letters: groups of beams")
    if any(one.branch.last.met is not None for one in spots):
        extra.append("◆ tokens of the constraints that are met")
    if any(one.branch.last.guessed for one in spots):
        extra.append("dotted: guessed ahead")
    for at, said in enumerate(extra):
        parts.append(caption(said, MARGIN, y + 20 + 17 * at))
    wide = max([x, *(MARGIN + len(said) * 6.2 for said in extra)])
    return parts, wide, y + 17 * len(extra) + 4


def _told(trace: Trace, planned: Plan) -> str:
    """The tree in a sentence, for those who do not see it."""
    ends = [one for one in planned.root.all() if not one.children and one.last.token is not None]
    told = []
    for end in ends:
        if end.state in ("best", "returned", "alive", "ended"):
            tokens = [node.token for node in trace.tree.path(end.last.number) if node.token is not None]
            score = "" if end.last.score is None else f", score {points(end.last.score)}"
            told.append(f"{STATES[end.state]}{score}: {plain(phrase(trace, tokens)).strip()}")
    dropped = sum(one.state == "dropped" for one in ends)
    return ". ".join([*told, f"{several(dropped, 'branch', 'branches')} dropped"])
