"""A sequence as text: its tokens, how likely the model held each, and what that comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from descant.trace.pictures.number_format import format_nats, format_score, pluralize, probability
from descant.trace.pictures.paths import sequence_leaf
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.pictures.text_layout import LayoutToken
from descant.trace.token_text import text_pieces, token_pieces
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = [
    "MIN_SCALE_NATS",
    "SHADE_LEVELS",
    "mean_entropy",
    "node_tokens",
    "perplexity",
    "prompt_tokens",
    "shade_level",
    "text_stats",
]

# From which probability on a token has which shade; the last is all the rest.
SHADE_LEVELS: Final = (
    (0.9, "90 % and more"),
    (0.5, "50 to 90 %"),
    (0.2, "20 to 50 %"),
    (0.05, "5 to 20 %"),
    (0.0, "less"),
)
MIN_SCALE_NATS: Final = 2.0  # nats that the tallest bar stands for at least, so that a calm text looks calm
_NEWLINE: Final = "↵"
_MAX_TOKEN_CELLS: Final = 400  # cells of a token
_MAX_PROMPT_TOKENS: Final = 24  # tokens of the prompt that are shown


def shade_level(node: Node) -> int | None:
    """Which of the shades a token has, by the probability that the model itself gave it; None: not kept."""
    if node.raw is None:
        return None
    return next(at for at, (least, _) in enumerate(SHADE_LEVELS) if probability(node.raw) >= least)


def node_tokens(trace: Trace, nodes: Sequence[Node]) -> list[LayoutToken]:
    """The tokens of nodes as they stand in a text."""
    return [
        LayoutToken(
            clip_pieces(token_pieces(trace, one.token), _MAX_TOKEN_CELLS),
            ends_line="\n" in trace.texts.get(one.token, ""),
        )
        for one in nodes
        if one.token is not None
    ]


def prompt_tokens(trace: Trace, where: TraceSelection) -> list[LayoutToken]:
    """The end of the prompt."""
    assert where.request is not None
    asked = trace.requests[where.request].prompt
    pieces = clip_pieces(
        text_pieces(trace, asked[-_MAX_PROMPT_TOKENS:]), _MAX_PROMPT_TOKENS * _MAX_TOKEN_CELLS
    )
    found = [LayoutToken([("… ", True)])] if len(asked) > _MAX_PROMPT_TOKENS else []
    for one, stands in pieces:
        parts = one.split(" ") if not stands else [one]
        found += [
            LayoutToken([(part if not at else f" {part}", stands)], ends_line=_NEWLINE in part)
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


def mean_entropy(nodes: Sequence[Node]) -> float | None:
    """The mean over the choices that were kept; None: none was."""
    known = [one.choice.entropy for one in nodes if one.choice is not None]
    return sum(known) / len(known) if known else None


def text_stats(trace: Trace, where: TraceSelection, nodes: Sequence[Node]) -> list[str]:
    """What the text comes to, in words."""
    said = [pluralize(len(nodes), "token")]
    if (value := perplexity(nodes)) is not None:
        said.append(f"perplexity {value:.2f}")
    if (mean := mean_entropy(nodes)) is not None:
        said.append(f"mean entropy {format_nats(mean)}")
    leaf = sequence_leaf(trace, where)
    if leaf is not None and nodes and leaf.number == nodes[-1].number:
        said += [f"score {format_score(leaf.score)}"] if leaf.score is not None else []
        said += [f"ended by {leaf.reason}"] if leaf.reason is not None else []
    return said
