"""Random constraints, and texts to read."""

from __future__ import annotations

import random
from typing import Any

from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from descant.errors import InputError


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
