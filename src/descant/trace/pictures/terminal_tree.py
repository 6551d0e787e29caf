"""The tree for a terminal: the best sequence down the left edge, what forked off it to its right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from descant.tokenization.display import Piece
from descant.trace.pictures.figures import several
from descant.trace.pictures.legend import STATES, ending, letter, progress
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_canvas import GROUPS, Paper, Span
from descant.trace.pictures.terminal_cells import cells, clipped, width_of, wrapped
from descant.trace.pictures.tree_layout import Branch, counted, plan
from descant.trace.records import Asked
from descant.trace.token_text import phrase

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["terminal_tree"]

SCORE: Final = 9  # cells
LEAST: Final = 24  # cells of the tree itself; with fewer there are no scores
RUN: Final = 5  # lines of one run
PROMPT: Final = 12  # tokens of it


@dataclass(frozen=True)
class Drawn:
    """One line: its rails, letters, and what stands at the right."""

    rails: str
    pieces: Sequence[Piece]
    score: str
    notes: Sequence[str]
    style: str


def terminal_tree(trace: Trace, where: Where, paper: Paper) -> str:
    """The tree of one request, as far as the step."""
    assert where.request is not None
    asked, planned = trace.requests[where.request], plan(trace, where, fold=True)
    lines = list(_chains(trace, asked, planned.root, paper.width))
    right = max((cells("  ".join(one.notes)) for one in lines), default=0)
    right = SCORE + (2 + right if right else 0)
    left = paper.width - right if paper.width - right >= LEAST else paper.width
    prompt = clipped(phrase(trace, asked.prompt[-PROMPT:]), paper.width)
    rows: list[list[Span]] = [*paper.told(asked.method, "bold"), *paper.told(counted(planned)), []]
    rows.append([("".join(one for one, _ in prompt), "dim")])
    for one in lines:
        row: list[Span] = [(one.rails, one.style if "bold" in one.style else "dim")]
        room = left - cells(one.rails)
        kept = clipped(one.pieces, room)
        row += [(said, f"{one.style} dim" if stands else one.style) for said, stands in kept]
        if left < paper.width:
            row.append((" " * (room - width_of(kept)), ""))
            row.append((f"{one.score:>{SCORE}}", one.style or "dim"))
            row += [(f"  {note}", one.style) for note in one.notes]
        rows.append(row)
    scored = any(branch.last.score is not None for branch in planned.root.all())
    kind = "summed log-probability, at an end as it was ranked" if scored else "probability"
    rows += [[], *paper.told(f"at the right: {kind}")]
    return paper.lines(rows)


def _chains(trace: Trace, asked: Asked, root: Branch, width: int) -> Iterator[Drawn]:
    """The lines below the prompt: its main line, and before each next part of that what forks off there."""
    for side in root.children[1:]:
        yield from _chain(trace, asked, side, "┠─" if root.children[0].state == "best" else "├─", width)
    if root.children:
        yield from _chain(trace, asked, root.children[0], "", width)


def _chain(trace: Trace, asked: Asked, first: Branch, hook: str, width: int) -> Iterator[Drawn]:
    """A main line from its first branch on, with what forks off it.

    `hook` is what ties it to the line that it forks off, as far right as its own rail.
    """
    best = first.state == "best"
    through, tee, end = ("┃", "┠─", "┗") if best else ("│", "├─", "╰")
    behind = "".join(_FOLLOWS.get(one, " ") for one in hook)
    at: Branch | None = first
    while at is not None:
        last = not at.children
        lines = _letters(trace, at, max(width - cells(hook) - 2 - SCORE - 14, 8))
        for place, pieces in enumerate(lines):
            final = place == len(lines) - 1
            if at is first and place == 0 and hook:
                rails = hook + ("─ " if last and final else "┬ ")
            else:
                rails = f"{behind}{end if last and final else through} "
            score, notes = (at.label, _notes(trace, asked, at)) if final else ("", [])
            yield Drawn(rails, pieces, score, notes, _style(at, asked))
        for side in at.children[1:]:
            yield from _chain(trace, asked, side, behind + tee, width)
        at = at.children[0] if at.children else None


_FOLLOWS: Final = {"├": "│", "┠": "┃", "│": "│", "┃": "┃"}  # what stands below each part of a hook


def _letters(trace: Trace, branch: Branch, width: int) -> list[list[Piece]]:
    tokens = [node.token for node in branch.nodes if node.token is not None]
    lines = wrapped(phrase(trace, tokens, spaces=True), width)
    if len(lines) <= RUN:
        return lines
    return [*lines[: RUN - 2], [(f"⋯ {several(len(tokens), 'token')} ⋯", True)], lines[-1]]


def _notes(trace: Trace, asked: Asked, branch: Branch) -> list[str]:
    """What is said behind a score."""
    node, said = branch.last, []
    if asked.groups > 1:
        said.append(letter(node.group))
    if met := progress(trace, node):
        said.append(f"◆{met}")
    if not branch.children:
        said.append(ending(node) or (STATES["dropped"] if branch.state == "dropped" else ""))
    return [one for one in said if one]


def _style(branch: Branch, asked: Asked) -> str:
    if branch.state == "dropped" and not branch.leads:
        return "dim"
    own = f"g{branch.last.group % GROUPS}" if asked.groups > 1 else "accent"
    if branch.state == "best":
        return f"bold {own}"
    return own if branch.state == "returned" else ""
