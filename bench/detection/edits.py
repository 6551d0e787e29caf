"""Edits that attack a watermark: words deleted, replaced or reordered."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

__all__ = ["KINDS", "SHARES", "edit_text"]

SHARES = (0.1, 0.3, 0.5)  # of the words
_WORD = re.compile(r"\s*\S+")  # with the space before it


def edit_text(text: str, kind: str, share: float, replacements: Sequence[str], rng: random.Random) -> str:
    """The text with a share of its words changed; `replacements` are the new words."""
    words = _WORD.findall(text)
    places = sorted(rng.sample(range(len(words)), round(share * len(words))))
    return "".join(_KINDS[kind](words, places, replacements, rng)).strip()


def _delete(words: list[str], places: list[int], _: Sequence[str], __: random.Random) -> list[str]:
    removed = set(places)
    return [word for at, word in enumerate(words) if at not in removed]


def _replace(
    words: list[str], places: list[int], replacements: Sequence[str], rng: random.Random
) -> list[str]:
    out = list(words)
    for at in places:
        out[at] = _with_space_of(words[at], rng.choice(replacements))
    return out


def _reorder(words: list[str], places: list[int], _: Sequence[str], rng: random.Random) -> list[str]:
    """The chosen words shuffled among their places, anywhere in the text; spaces stay."""
    out, order = list(words), list(places)
    rng.shuffle(order)
    for at, source in zip(places, order, strict=True):
        out[at] = _with_space_of(words[at], words[source].strip())
    return out


def _with_space_of(old: str, new: str) -> str:
    return old[: len(old) - len(old.lstrip())] + new


_KINDS: dict[str, Callable[[list[str], list[int], Sequence[str], random.Random], list[str]]] = {
    "deleted": _delete,
    "replaced": _replace,
    "reordered": _reorder,
}
KINDS = tuple(_KINDS)
