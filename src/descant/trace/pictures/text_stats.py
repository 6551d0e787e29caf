"""A sequence as text: its tokens, how likely the model held each, and what that comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.figures import nats, points, several, share
from descant.trace.pictures.paths import leaf_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.terminal_cells import clipped
from descant.trace.pictures.text_layout import Word
from descant.trace.token_text import phrase, word
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["LEAST", "SHADES", "entropy", "figures", "perplexity", "prompt", "shade", "words"]

# From which probability on a token has which shade; the last is all the rest.
SHADES: Final = (
    (0.9, "90 % and more"),
    (0.5, "50 to 90 %"),
    (0.2, "20 to 50 %"),
    (0.05, "5 to 20 %"),
    (0.0, "less"),
)
LEAST: Final = 2.0  # nats that the tallest bar stands for at least, so that a calm text looks calm
_NEWLINE: Final = "↵"
_LONGEST: Final = 400  # cells of a token
_BEFORE: Final = 24  # tokens of the prompt that are shown


def shade(node: Node) -> int | None:
    """Which of the shades a token has, by the probability that the model itself gave it; None: not kept."""
    if node.raw is None:
        return None
    return next(at for at, (least, _) in enumerate(SHADES) if share(node.raw) >= least)


def words(trace: Trace, nodes: Sequence[Node]) -> list[Word]:
    """The tokens of nodes as they stand in a text."""
    return [
        Word(clipped(word(trace, one.token), _LONGEST), ends="\n" in trace.texts.get(one.token, ""))
        for one in nodes
        if one.token is not None
    ]


def prompt(trace: Trace, where: Where) -> list[Word]:
    """The end of the prompt."""
    assert where.request is not None
    asked = trace.requests[where.request].prompt
    pieces = clipped(phrase(trace, asked[-_BEFORE:]), _BEFORE * _LONGEST)
    found = [Word([("… ", True)])] if len(asked) > _BEFORE else []
    for one, stands in pieces:
        parts = one.split(" ") if not stands else [one]
        found += [
            Word([(part if not at else f" {part}", stands)], ends=_NEWLINE in part)
            for at, part in enumerate(parts)
        ]
    return found


def perplexity(nodes: Sequence[Node]) -> float | None:
    """Of the tokens whose probability was kept; None: of none."""
    logs = [one.raw for one in nodes if one.raw is not None]
    if not logs:
        return None
    mean = sum(logs) / len(logs)
    return math.exp(-mean) if -mean < 700 else math.inf


def entropy(nodes: Sequence[Node]) -> float | None:
    """The mean over the choices that were kept; None: none was."""
    known = [one.look.entropy for one in nodes if one.look is not None]
    return sum(known) / len(known) if known else None


def figures(trace: Trace, where: Where, nodes: Sequence[Node]) -> list[str]:
    """What the text comes to, in words."""
    said = [several(len(nodes), "token")]
    if (value := perplexity(nodes)) is not None:
        said.append(f"perplexity {value:.2f}")
    if (mean := entropy(nodes)) is not None:
        said.append(f"mean entropy {nats(mean)}")
    leaf = leaf_of(trace, where)
    if leaf is not None and nodes and leaf.number == nodes[-1].number:
        said += [f"score {points(leaf.score)}"] if leaf.score is not None else []
        said += [f"ended by {leaf.reason}"] if leaf.reason is not None else []
    return said
