"""What somebody does to a text who would hide its mark: words deleted, replaced or reordered."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

__all__ = ["KINDS", "SHARES", "edited"]

SHARES = (0.1, 0.3, 0.5)  # of the words
_WORD = re.compile(r"\s*\S+")  # with the space before it


def edited(text: str, kind: str, share: float, others: Sequence[str], chance: random.Random) -> str:
    """The text with a share of its words changed; `others` are the words that replace some."""
    words = _WORD.findall(text)
    places = sorted(chance.sample(range(len(words)), round(share * len(words))))
    return "".join(_KINDS[kind](words, places, others, chance)).strip()


def _deleted(words: list[str], places: list[int], _: Sequence[str], __: random.Random) -> list[str]:
    gone = set(places)
    return [word for at, word in enumerate(words) if at not in gone]


def _replaced(words: list[str], places: list[int], others: Sequence[str], chance: random.Random) -> list[str]:
    out = list(words)
    for at in places:
        out[at] = _spaced(words[at], chance.choice(others))
    return out


def _reordered(words: list[str], places: list[int], _: Sequence[str], chance: random.Random) -> list[str]:
    """The chosen words shuffled among their places, anywhere in the text; spaces stay."""
    out, order = list(words), list(places)
    chance.shuffle(order)
    for at, source in zip(places, order, strict=True):
        out[at] = _spaced(words[at], words[source].strip())
    return out


def _spaced(old: str, new: str) -> str:
    return old[: len(old) - len(old.lstrip())] + new


_KINDS: dict[str, Callable[[list[str], list[int], Sequence[str], random.Random], list[str]]] = {
    "deleted": _deleted,
    "replaced": _replaced,
    "reordered": _reordered,
}
KINDS = tuple(_KINDS)
