"""A text cut into the parts that a picture shows, each with what its token says for the mark."""

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

MAX_LEVEL: Final = 3  # level of the strongest evidence, for or against
_GREEN_LIST: Final = "green list"
_BINARY_LEVEL: Final = 2  # level of evidence that is all or nothing
# Lines and blanks as the text has them; joiners make letters and emoji what they are.
_UNESCAPED: Final = "\n\t\u00a0\u3000\u200c\u200d"


@dataclass(frozen=True)
class TextSpan:
    """A piece of text that belongs to one token, to several that share a character, or to none."""

    text: str
    token_indices: tuple[int, ...]  # places in the text
    titles: tuple[str, ...]  # what each of them is, in words
    level: int | None  # from -STRONGEST, against the mark, to STRONGEST, for it; None: not scored
    in_passage: bool  # in the passage that was found


def split_spans(detection: Detection, text: str | Sequence[str]) -> list[TextSpan]:
    """The parts of a text, which is a string, or the strings of its tokens; all of it, in order."""
    if isinstance(text, str):
        if detection.offsets is None:
            must = "must be the strings of the tokens where a detection has no offsets"
            raise InputError("texts", must, text)
        pieces = list(_split_by_tokens(text, detection.offsets))
    else:
        if len(text) != len(detection.ids):
            raise InputError("texts", f"must have {len(detection.ids)} tokens, as the detection", len(text))
        pieces = [(piece, (place,)) for place, piece in enumerate(text)]
    levels, within = _score_levels(detection), _passage_mask(detection, [tokens for _, tokens in pieces])
    return [
        _make_span(detection, levels, piece, tokens, inside)
        for (piece, tokens), inside in zip(pieces, within, strict=True)
    ]


def to_printable(text: str) -> str:
    """The text with what cannot be seen, or would turn the text around it, as its code point."""
    return join_pieces(escape_invisible(text, keep=_UNESCAPED))


def _make_span(
    detection: Detection, levels: Sequence[int | None], piece: str, tokens: tuple[int, ...], inside: bool
) -> TextSpan:
    known = [level for level in (levels[token] for token in tokens) if level is not None]
    return TextSpan(
        text=piece,
        token_indices=tokens,
        titles=tuple(_token_title(detection, token, piece) for token in tokens),
        level=round(sum(known) / len(known)) if known else None,
        in_passage=inside,
    )


def _passage_mask(detection: Detection, pieces: Sequence[tuple[int, ...]]) -> list[bool]:
    """Which pieces are in the passage: from the first with a token of it to the last, gaps and all."""
    if detection.span is None:
        return [False] * len(pieces)
    first, last = detection.span
    held = [at for at, tokens in enumerate(pieces) if any(first <= token < last for token in tokens)]
    return [bool(held) and held[0] <= at <= held[-1] for at in range(len(pieces))]


def _split_by_tokens(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The text's pieces with their tokens: tokens that share characters share a piece."""
    at, start, tokens = 0, 0, list[int]()
    for place, (first, last) in enumerate(offsets):
        if last <= first:  # a token without text, such as one that begins a sequence
            continue
        if tokens and first < at:
            tokens.append(place)
            at = max(at, last)
            continue
        if tokens:
            yield text[start:at], tuple(tokens)
        if first > at:
            yield text[at:first], ()
        start, at, tokens = first, last, [place]
    if tokens:
        yield text[start:at], tuple(tokens)
    if at < len(text):
        yield text[at:], ()


def _score_levels(detection: Detection) -> list[int | None]:
    """How much each token says, on a scale on which all levels are about as frequent in unmarked text."""
    scored, value = detection.evidence
    spread = float(np.std(value[scored])) if scored.any() else 0.0

    def level(one: float) -> int:
        if detection.scheme == _GREEN_LIST:
            return _BINARY_LEVEL if one > 0.5 else -_BINARY_LEVEL
        if detection.scheme == "gumbel":
            share = 1.0 - exp(-one)
        else:
            share = 0.5 + 0.5 * erf((one - detection.expected) / (spread or 1.0) / sqrt(2.0))
        return min(int(share * (2 * MAX_LEVEL + 1)), 2 * MAX_LEVEL) - MAX_LEVEL

    return [level(float(one)) if known else None for known, one in zip(scored, value, strict=True)]


def _token_title(detection: Detection, token: int, piece: str) -> str:
    scored, value = detection.evidence
    if not scored[token]:
        says = "not scored"
    elif detection.scheme == _GREEN_LIST:
        says = "green" if value[token] > 0.5 else "red"
    else:
        usual = f" (unmarked: {detection.expected:.2f})" if isfinite(detection.expected) else ""
        says = f"value {value[token]:.2f}{usual}"
    return f"{piece!r}, id {detection.ids[token]}, {says}"
