"""A sequence as text: its tokens, their probabilities, perplexity and entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from descant.trace.pictures.number_format import format_nats, format_score, pluralize, probability
from descant.trace.pictures.paths import sequence_leaf
from descant.trace.pictures.selection import TraceSelection
from descant.trace.pictures.terminal_cells import clip_pieces
from descant.trace.pictures.text_layout import LayoutToken
from descant.trace.token_text import text_pieces, token_pieces
from descant.trace.trace_data import TraceData
from descant.trace.tree import Node

__all__ = [
    "MAX_DRAWN_TOKENS",
    "MIN_SCALE_NATS",
    "SHADE_LEVELS",
    "mean_entropy",
    "node_tokens",
    "perplexity",
    "prompt_tokens",
    "shade_level",
    "text_stats",
]

# Minimum probability of each shade, with its label.
SHADE_LEVELS: Final = (
    (0.9, "90 % and more"),
    (0.5, "50 to 90 %"),
    (0.2, "20 to 50 %"),
    (0.05, "5 to 20 %"),
    (0.0, "less"),
)
MIN_SCALE_NATS: Final = 2.0  # minimum of the tallest bar, so that low entropies look low
MAX_DRAWN_TOKENS: Final = 10_000  # of a sequence; a picture of more is too large to be looked at
_NEWLINE: Final = "↵"
_MAX_TOKEN_CELLS: Final = 400
_MAX_PROMPT_TOKENS: Final = 24  # shown tokens of the prompt


def shade_level(node: Node) -> int | None:
    """The shade of a token by the model's own probability; None: not recorded."""
    if node.raw is None:
        return None
    return next(
        level
        for level, (min_probability, _) in enumerate(SHADE_LEVELS)
        if probability(node.raw) >= min_probability
    )


def node_tokens(trace: TraceData, nodes: Sequence[Node]) -> list[LayoutToken]:
    """The tokens of nodes, for layout."""
    return [
        LayoutToken(
            clip_pieces(token_pieces(trace, one.token), _MAX_TOKEN_CELLS),
            ends_line="\n" in trace.texts.get(one.token, ""),
        )
        for one in nodes
        if one.token is not None
    ]


def prompt_tokens(
    trace: TraceData, selection: TraceSelection, nodes: Sequence[Node] = ()
) -> list[LayoutToken]:
    """The last tokens of the prompt, for layout; an ellipsis if the first of `nodes` are not drawn."""
    assert selection.request is not None
    if len(nodes) > MAX_DRAWN_TOKENS:
        return [LayoutToken([("… ", True)])]
    prompt = trace.requests[selection.request].prompt
    pieces = clip_pieces(
        text_pieces(trace, prompt[-_MAX_PROMPT_TOKENS:]), _MAX_PROMPT_TOKENS * _MAX_TOKEN_CELLS
    )
    tokens = [LayoutToken([("… ", True)])] if len(prompt) > _MAX_PROMPT_TOKENS else []
    for text, is_escaped in pieces:
        parts = text.split(" ") if not is_escaped else [text]
        tokens += [
            LayoutToken([(part if not index else f" {part}", is_escaped)], ends_line=_NEWLINE in part)
            for index, part in enumerate(parts)
        ]
    return tokens


def perplexity(nodes: Sequence[Node]) -> float | None:
    """Perplexity of the tokens with a recorded probability; None: there are none."""
    logs = [one.raw for one in nodes if one.raw is not None]
    if not logs:
        return None
    mean = sum(logs) / len(logs)
    return math.exp(-mean) if -mean < 700 else math.inf


def mean_entropy(nodes: Sequence[Node]) -> float | None:
    """Mean entropy of the recorded choices; None: there are none."""
    entropies = [one.choice.entropy for one in nodes if one.choice is not None]
    return sum(entropies) / len(entropies) if entropies else None


def text_stats(trace: TraceData, selection: TraceSelection, nodes: Sequence[Node]) -> list[str]:
    """Statistics of the text, as phrases."""
    parts = [pluralize(len(nodes), "token")]
    if len(nodes) > MAX_DRAWN_TOKENS:
        parts.append(f"the last {MAX_DRAWN_TOKENS:,} drawn")
    if (value := perplexity(nodes)) is not None:
        parts.append(f"perplexity {value:.2f}")
    if (mean := mean_entropy(nodes)) is not None:
        parts.append(f"mean entropy {format_nats(mean)}")
    leaf = sequence_leaf(trace, selection)
    if leaf is not None and nodes and leaf.number == nodes[-1].number:
        parts += [f"score {format_score(leaf.score)}"] if leaf.score is not None else []
        parts += [f"ended by {leaf.reason}"] if leaf.reason is not None else []
    return parts
