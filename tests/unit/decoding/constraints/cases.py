"""Random constraints, and texts to read."""

from __future__ import annotations

import random
from typing import Any

from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from descant.errors import InputError

NOISE = 100  # tokens from here on are in no constraint of `apart`


def overlapping(draw: random.Random) -> tuple[list[Any], list[list[list[int]]], list[int]]:
    """Constraints over very few tokens, their phrases, and a text."""
    size = draw.choice([2, 3, 3, 4])

    def phrase() -> list[int]:
        return [draw.randrange(size) for _ in range(draw.randint(1, 4))]

    made: list[Any] = []
    choices = []
    count = draw.randint(1, 4)
    while len(made) < count:
        phrases = [phrase() for _ in range(draw.choice([1, 1, 2, 3]))]
        try:
            one = PhrasalConstraint(phrases[0]) if len(phrases) == 1 else DisjunctiveConstraint(phrases)
        except InputError:  # one begins another
            continue
        made.append(one)
        choices.append(phrases)
    return made, choices, [draw.randrange(size) for _ in range(draw.randint(1, 24))]


def apart(draw: random.Random) -> tuple[list[Any], list[int]]:
    """Words that share no token, and a text in which no token both breaks one off and begins one."""
    pool = list(range(NOISE))
    draw.shuffle(pool)

    def phrase(least: int = 1) -> list[int]:
        return [pool.pop() for _ in range(draw.randint(least, 4))]

    def choice() -> list[list[int]]:
        stem = phrase(0)
        return [stem + phrase() for _ in range(draw.randint(2, 3))]

    words = [choice() if draw.random() < 0.4 else phrase() for _ in range(draw.randint(1, 5))]
    text: list[int] = []
    for _ in range(draw.randint(1, 14)):
        kind = draw.random()
        word = draw.choice(words)
        whole = draw.choice(word) if isinstance(word[0], list) else word
        if kind < 0.2:
            text.append(NOISE + draw.randrange(5))
        elif kind < 0.3:
            text += whole[draw.randint(1, len(whole)) :]
        else:
            part = whole[: draw.randint(1, len(whole))] if kind < 0.6 else whole
            text += part if part == whole else [*part, NOISE]
    return words, text
