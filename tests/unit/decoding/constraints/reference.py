"""The satisfied constraints of a text, by a search of the whole text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Choices = Sequence[Sequence[Sequence[int]]]  # the phrases of each constraint


@dataclasses.dataclass
class Found:
    """The places of those met, in order; what is begun of each other; where reading goes on."""

    met: list[int]
    begun: dict[int, list[int]]
    start: int

    def next_tokens(self, choices: Choices) -> set[int]:
        """The tokens that go on with the longest beginning of each constraint begun."""
        return {
            phrase[len(part)]
            for place, part in self.begun.items()
            for phrase in choices[place]
            if list(phrase[: len(part)]) == part
        }


def look_through(choices: Choices, text: Sequence[int], ordered: bool = False, gap: int = 0) -> Found:
    """What `text` has met."""
    apart = ordered or gap > 0
    met: list[int] = []
    start = 0
    for end in range(1, len(text) + 1):
        seen = list(text[start:end])
        left = [place for place in range(len(choices)) if place not in met]
        readers = left[:1] if ordered else left
        here = [place for place in readers if any(_ends(seen, phrase) for phrase in choices[place])]
        if here and apart:
            met.append(here[0])
            start = end + gap
        else:
            met += here
    seen = list(text[start:])
    left = [place for place in range(len(choices)) if place not in met]
    parts = {place: _part(seen, choices[place]) for place in (left[:1] if ordered else left)}
    return Found(met, {place: part for place, part in parts.items() if part}, start)


def _ends(seen: list[int], phrase: Sequence[int]) -> bool:
    return len(seen) >= len(phrase) and seen[-len(phrase) :] == list(phrase)


def _part(seen: list[int], phrases: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning of a phrase with which the text ends."""
    parts = [list(phrase[:size]) for phrase in phrases for size in range(1, len(phrase))]
    return max((part for part in parts if _ends(seen, part)), key=len, default=[])
