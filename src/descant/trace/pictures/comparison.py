"""Two runs side by side: how far they say the same, what was set otherwise, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from descant.errors import InputError
from descant.tokenization.display import plain
from descant.trace.pictures.figures import amount, points, several
from descant.trace.pictures.paths import path_of
from descant.trace.pictures.selection import Where
from descant.trace.pictures.text_stats import entropy, perplexity
from descant.trace.records import Asked
from descant.trace.token_text import word
from descant.trace.tree import Node

if TYPE_CHECKING:
    from descant.trace.trace import Trace

__all__ = ["Contrast", "Side", "contrast"]

NONE = "–"
Line = tuple[str, str, str]  # a name, and what it is on either side


@dataclass(frozen=True)
class Side:
    """One of the two."""

    name: str
    trace: Trace
    where: Where
    asked: Asked
    nodes: Sequence[Node]


@dataclass(frozen=True)
class Contrast:
    """Both, and what sets them apart."""

    sides: tuple[Side, Side]
    shared: int  # tokens that both begin with
    settings: Sequence[Line]
    results: Sequence[Line]

    def parting(self) -> str:
        """Where they part, in words."""
        one, other = (len(side.nodes) for side in self.sides)
        if self.shared == one == other:
            return f"both say the same ({several(one, 'token')})"
        if not self.shared:
            return "they part at the first token"
        return f"the first {several(self.shared, 'token')} the same, they part at token {self.shared + 1}"


def contrast(trace: Trace, where: Where, beside: Trace | None) -> Contrast:
    """Of two traces, or of the first two requests of one."""
    if beside is None and len(trace.requests) < 2:
        raise InputError(
            "beside", "must be a trace where the other has one request", beside, "give a second one"
        )
    if beside is not None:
        place = list(trace.requests).index(where.request or 0)
        others = list(beside.requests)
        request = others[min(place, len(others) - 1)] if others else None
        second = _side("B", beside, Where(request).within(beside))
    else:
        request = next(one for one in trace.requests if one != where.request)
        second = _side("B", trace, Where(request).within(trace))
    sides = (_side("A", trace, where), second)
    said = [[plain(word(side.trace, node.token or 0)) for node in side.nodes] for side in sides]
    shared = 0
    for one, other in zip(*said, strict=False):
        if one != other:
            break
        shared += 1
    return Contrast(sides, shared, _settings(sides), _results(sides))


def _side(name: str, trace: Trace, where: Where) -> Side:
    assert where.request is not None
    return Side(name, trace, where, trace.requests[where.request], path_of(trace, where))


def _settings(sides: Sequence[Side]) -> list[Line]:
    """What was set in one way here and in another there."""
    known: list[Mapping[str, Any]] = [
        {"model": side.trace.header.model, "method": side.asked.method, **side.asked.config} for side in sides
    ]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    lines = [(name, _said(known[0].get(name)), _said(known[1].get(name))) for name in names]
    return [line for line in lines if line[1] != line[2]]


def _said(value: object) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value)


def _results(sides: Sequence[Side]) -> list[Line]:
    one, other = map(_figures, sides)
    lines = [(name, one[name], other[name]) for name in one]
    return [line for line in lines if {line[1], line[2]} != {NONE}]


def _figures(side: Side) -> dict[str, str]:
    last = side.nodes[-1] if side.nodes else None
    of_it = side.trace.steps_of(side.asked.request)
    cache = max((one.cache or 0 for one in of_it), default=0)
    value, mean = perplexity(side.nodes), entropy(side.nodes)
    return {
        "tokens": str(len(side.nodes)),
        "ended by": NONE if last is None or last.reason is None else last.reason,
        "perplexity": NONE if value is None else f"{value:.2f}",
        "mean entropy, nats": NONE if mean is None else f"{mean:.2f}",
        "score": NONE if last is None or last.score is None else points(last.score),
        "steps": str(len(of_it)),
        "time": f"{sum(one.seconds for one in of_it):.2f} s",
        "cache, at most": amount(cache) if cache else NONE,
    }
