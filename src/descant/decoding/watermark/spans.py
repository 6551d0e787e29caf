"""Splits a text into spans with the score level of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import erf, exp, isfinite, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from descant.errors import InputError
from descant.tokenization.display import escape_invisible, join_pieces

if TYPE_CHECKING:
    from descant.decoding.watermark.detection import Detection

__all__ = ["MAX_LEVEL", "TextSpan", "split_spans", "to_printable"]

MAX_LEVEL: Final = 3  # level of the strongest evidence for or against the watermark
_GREEN_LIST: Final = "green list"
_BINARY_LEVEL: Final = 2  # level of binary scores
# White space stays as it is; joiners are part of letters and emoji.
_UNESCAPED: Final = "\n\t\u00a0\u3000\u200c\u200d"


@dataclass(frozen=True)
class TextSpan:
    """A piece of text of one token, of several that share a character, or of none."""

    text: str
    token_indices: tuple[int, ...]  # token positions
    titles: tuple[str, ...]  # description of each token
    level: int | None  # from -MAX_LEVEL (against) to MAX_LEVEL (for the watermark); None: not scored
    in_passage: bool  # whether it belongs to the passage found


def split_spans(detection: Detection, text: str | Sequence[str]) -> list[TextSpan]:
    """Split a text, given as a string or as its token strings, into consecutive spans."""
    if isinstance(text, str):
        if detection.offsets is None:
            must = "must be token strings if the detection has no offsets"
            raise InputError("texts", must, text)
        pieces = list(_split_by_tokens(text, detection.offsets))
    else:
        if len(text) != len(detection.ids):
            raise InputError("texts", f"must have {len(detection.ids)} tokens, like the detection", len(text))
        pieces = [(piece, (index,)) for index, piece in enumerate(text)]
    levels, passage = _score_levels(detection), _passage_mask(detection, [tokens for _, tokens in pieces])
    return [
        _make_span(detection, levels, piece, tokens, in_passage)
        for (piece, tokens), in_passage in zip(pieces, passage, strict=True)
    ]


def to_printable(text: str) -> str:
    """Replace invisible and bidirectional control characters by their code points."""
    return join_pieces(escape_invisible(text, keep=_UNESCAPED))


def _make_span(
    detection: Detection, levels: Sequence[int | None], piece: str, tokens: tuple[int, ...], in_passage: bool
) -> TextSpan:
    scored = [level for level in (levels[token] for token in tokens) if level is not None]
    return TextSpan(
        text=piece,
        token_indices=tokens,
        titles=tuple(_token_title(detection, token, piece) for token in tokens),
        level=round(sum(scored) / len(scored)) if scored else None,
        in_passage=in_passage,
    )


def _passage_mask(detection: Detection, pieces: Sequence[tuple[int, ...]]) -> list[bool]:
    """Mask of the pieces between the first and the last token of the passage, gaps included."""
    if detection.span is None:
        return [False] * len(pieces)
    first, last = detection.span
    inside = [index for index, tokens in enumerate(pieces) if any(first <= token < last for token in tokens)]
    return [bool(inside) and inside[0] <= index <= inside[-1] for index in range(len(pieces))]


def _split_by_tokens(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Split the text into pieces with their tokens; tokens that share characters share a piece."""
    end, start, tokens = 0, 0, list[int]()
    for index, (first, last) in enumerate(offsets):
        if last <= first:  # a token without text, such as a start token
            continue
        if tokens and first < end:
            tokens.append(index)
            end = max(end, last)
            continue
        if tokens:
            yield text[start:end], tuple(tokens)
        if first > end:
            yield text[end:first], ()
        start, end, tokens = first, last, [index]
    if tokens:
        yield text[start:end], tuple(tokens)
    if end < len(text):
        yield text[end:], ()


def _score_levels(detection: Detection) -> list[int | None]:
    """Level of each token, on a scale where all levels are about equally frequent in unmarked text."""
    mask, values = detection.evidence
    spread = float(np.std(values[mask])) if mask.any() else 0.0

    def level(value: float) -> int:
        if detection.scheme == _GREEN_LIST:
            return _BINARY_LEVEL if value > 0.5 else -_BINARY_LEVEL
        if detection.scheme == "gumbel":
            quantile = 1.0 - exp(-value)
        else:
            quantile = 0.5 + 0.5 * erf((value - detection.expected) / (spread or 1.0) / sqrt(2.0))
        return min(int(quantile * (2 * MAX_LEVEL + 1)), 2 * MAX_LEVEL) - MAX_LEVEL

    return [level(float(value)) if is_scored else None for is_scored, value in zip(mask, values, strict=True)]


def _token_title(detection: Detection, token: int, piece: str) -> str:
    mask, values = detection.evidence
    if not mask[token]:
        description = "not scored"
    elif detection.scheme == _GREEN_LIST:
        description = "green" if values[token] > 0.5 else "red"
    else:
        reference = f" (unmarked: {detection.expected:.2f})" if isfinite(detection.expected) else ""
        description = f"value {values[token]:.2f}{reference}"
    return f"{piece!r}, id {detection.ids[token]}, {description}"
