"""A sequence as text: its tokens, their probabilities, perplexity and entropy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from descant.tokenization.display import TextPiece
from descant.trace.pictures.cells import (
    clip_pieces,
    format_nats,
    format_score,
    pieces_width,
    pluralize,
    probability,
    split_lines,
)
from descant.trace.trace_data import Node, TraceData, TraceSelection, text_pieces, token_pieces


@dataclass(frozen=True)
class LayoutToken:
    """A token to be placed."""

    pieces: Sequence[TextPiece]
    min_width: int = 0  # cells
    ends_line: bool = False

    @property
    def width(self) -> int:
        """Its cells."""
        return max(pieces_width(self.pieces), self.min_width)


@dataclass(frozen=True)
class PlacedToken:
    """A token on a line, or a part of one that is longer than a line."""

    index: int  # of the token
    pieces: Sequence[TextPiece]
    column: int
    width: int  # cells


def layout_tokens(tokens: Sequence[LayoutToken], width: int) -> list[list[PlacedToken]]:
    """Lines of tokens; those of one word stay together if they fit on a line."""
    lines: list[list[PlacedToken]] = [[]]
    column = 0

    def break_line() -> None:
        nonlocal column
        lines.append([])
        column = 0

    for group in _unbreakable_groups(tokens):
        if column and column + sum(tokens[index].width for index in group) > width:
            break_line()
        for index in group:
            for part in split_lines(tokens[index].pieces, width):
                size = min(max(pieces_width(part), tokens[index].min_width), width)
                if column and column + size > width:
                    break_line()
                lines[-1].append(PlacedToken(index, part, column, size))
                column += size
        if tokens[group[-1]].ends_line:
            break_line()
    return lines if lines[-1] else lines[:-1]


def _unbreakable_groups(tokens: Sequence[LayoutToken]) -> Iterable[list[int]]:
    """Indices of tokens between which a line should not break."""
    group: list[int] = []
    for index, token in enumerate(tokens):
        first = token.pieces[0] if token.pieces else ("", False)
        if group and (tokens[index - 1].ends_line or first[1] or not first[0] or not first[0][0].isalnum()):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


# Minimum probability of each shade, with its label.
SHADE_LEVELS: Final = (
    (0.9, "90 % and more"),
    (0.5, "50 to 90 %"),
    (0.2, "20 to 50 %"),
    (0.05, "5 to 20 %"),
    (0.0, "less"),
)
_MIN_SCALE_NATS: Final = 2.0  # minimum of the tallest bar, so that low entropies look low
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
            clip_pieces(token_pieces(trace, node.token), _MAX_TOKEN_CELLS),
            ends_line="\n" in trace.texts.get(node.token, ""),
        )
        for node in nodes
        if node.token is not None
    ]


def drawn_text(selection: TraceSelection) -> tuple[list[LayoutToken], list[Node | None]]:
    """The end of the prompt and the text of a sequence for layout, and the node of each token."""
    nodes = selection.path
    prompt, drawn = _prompt_tokens(selection, nodes), nodes[-MAX_DRAWN_TOKENS:]
    return [*prompt, *node_tokens(selection.trace, drawn)], [*[None] * len(prompt), *drawn]


def _prompt_tokens(selection: TraceSelection, nodes: Sequence[Node]) -> list[LayoutToken]:
    """The last tokens of the prompt, for layout; an ellipsis if the first of `nodes` are not drawn."""
    if len(nodes) > MAX_DRAWN_TOKENS:
        return [LayoutToken([("… ", True)])]
    prompt = selection.request.prompt
    pieces = clip_pieces(
        text_pieces(selection.trace, prompt[-_MAX_PROMPT_TOKENS:]), _MAX_PROMPT_TOKENS * _MAX_TOKEN_CELLS
    )
    tokens = [LayoutToken([("… ", True)])] if len(prompt) > _MAX_PROMPT_TOKENS else []
    for text, is_escaped in pieces:
        parts = text.split(" ") if not is_escaped else [text]
        tokens += [
            LayoutToken([(part if not index else f" {part}", is_escaped)], ends_line=_NEWLINE in part)
            for index, part in enumerate(parts)
        ]
    return tokens


def entropy_scale(nodes: Sequence[Node | None]) -> float:
    """The entropy of the tallest bar."""
    choices = (node.choice for node in nodes if node is not None)
    return max([_MIN_SCALE_NATS, *(choice.entropy for choice in choices if choice is not None)])


def perplexity(nodes: Sequence[Node]) -> float | None:
    """Perplexity of the tokens with a recorded probability; None: there are none."""
    logs = [node.raw for node in nodes if node.raw is not None]
    if not logs:
        return None
    mean = sum(logs) / len(logs)
    return math.exp(-mean) if -mean < 700 else math.inf


def mean_entropy(nodes: Sequence[Node]) -> float | None:
    """Mean entropy of the recorded choices; None: there are none."""
    entropies = [node.choice.entropy for node in nodes if node.choice is not None]
    return sum(entropies) / len(entropies) if entropies else None


def text_stats(selection: TraceSelection, nodes: Sequence[Node]) -> list[str]:
    """Statistics of the text, as phrases."""
    parts = [pluralize(len(nodes), "token")]
    if len(nodes) > MAX_DRAWN_TOKENS:
        parts.append(f"the last {MAX_DRAWN_TOKENS:,} drawn")
    if (value := perplexity(nodes)) is not None:
        parts.append(f"perplexity {value:.2f}")
    if (mean := mean_entropy(nodes)) is not None:
        parts.append(f"mean entropy {format_nats(mean)}")
    leaf = selection.leaf
    if leaf is not None and nodes and leaf.number == nodes[-1].number:
        parts += [f"score {format_score(leaf.score)}"] if leaf.score is not None else []
        parts += [f"ended by {leaf.reason}"] if leaf.reason is not None else []
    return parts
