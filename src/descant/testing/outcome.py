"""Outcomes: what became of each request of a session, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import Cache
from descant.core.records import Hypothesis, Observation
from descant.engine.session import Failed, Finished, Request, Session, Tokens
from descant.errors import DescantError
from descant.testing.admission_schedule import Schedule

__all__ = ["Outcome", "compare", "outcomes"]

TOLERANCE = 1e-4


@dataclass
class Outcome:
    """What became of a request: its sequences or its error, and what was seen on the way."""

    hypotheses: list[Hypothesis] = field(default_factory=list)
    error: DescantError | None = None
    cancelled: bool = False
    streamed: dict[int, list[int]] = field(default_factory=dict)  # slot -> its tokens as they came
    logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # tokens so far -> [V]

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of every sequence."""
        return [one.tokens.tolist() for one in self.hypotheses]

    @property
    def reasons(self) -> list[str]:
        """Why every sequence ended."""
        return [one.reason for one in self.hypotheses]


class _Run:
    """One session driven by a schedule."""

    def __init__(self, model: Any, requests: Sequence[Request], cache: Cache | None) -> None:
        self._requests = requests
        self._session = Session(model, observe=self._see, cache=cache)
        self._found = [Outcome() for _ in requests]
        self._place: dict[int, int] = {}  # request number -> place in the list
        self._number: dict[int, int] = {}

    def _see(self, seen: Observation) -> None:
        rows = seen.rows
        for row in range(len(rows)):
            found = self._found[self._place[int(rows.request[row])]]
            prefix = rows.tokens[row, : int(rows.length[row])].tolist()
            found.logits[tuple(prefix)] = seen.logits[row, 0].cpu().clone()

    def drive(self, schedule: Schedule) -> list[Outcome]:
        """What became of every request."""
        step = 0
        while step <= schedule.last or len(self._session):
            self._admit(schedule.admissions.get(step, ()), schedule.together)
            for place in schedule.cancels.get(step, ()):
                self._cancel(place)
            for event in self._session.step():
                self._take(event)
            step += 1
        if self._session.rows:
            raise AssertionError(f"{self._session.rows} rows are left after every request has ended")
        return self._found

    def _admit(self, places: Sequence[int], together: bool) -> None:
        for group in [places] if together else [[place] for place in places]:
            numbers = self._session.admit(*(self._requests[place] for place in group))
            for number, place in zip(numbers, group, strict=True):
                self._place[number], self._number[place] = place, number

    def _cancel(self, place: int) -> None:
        found = self._found[place]
        if found.hypotheses or found.error is not None:
            return  # it has ended before
        found.cancelled = True
        self._session.cancel(self._number[place])

    def _take(self, event: object) -> None:
        if isinstance(event, Tokens):
            for request, slot, token in torch.stack((event.request, event.slot, event.token), 1).tolist():
                self._found[self._place[request]].streamed.setdefault(slot, []).append(token)
        elif isinstance(event, Finished):
            self._found[self._place[event.request]].hypotheses = event.hypotheses
        elif isinstance(event, Failed):
            self._found[self._place[event.request]].error = event.error


def outcomes(
    model: Any, requests: Sequence[Request], schedule: Schedule | None = None, cache: Cache | None = None
) -> list[Outcome]:
    """Run the requests in one session, all at once or by a schedule; what became of each."""
    return _Run(model, requests, cache).drive(schedule or Schedule.at_once(range(len(requests))))


def compare(alone: Outcome, other: Outcome, where: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless two outcomes have the same tokens, the same ends, and near scores."""
    if type(alone.error) is not type(other.error):
        raise AssertionError(f"{where}: ended with {_ending(other)}, not {_ending(alone)}")
    if alone.tokens != other.tokens:
        raise AssertionError(f"{where}: other tokens\n  alone {alone.tokens}\n  there {other.tokens}")
    if alone.reasons != other.reasons:
        raise AssertionError(f"{where}: ended by {other.reasons}, alone by {alone.reasons}")
    if alone.streamed != other.streamed:
        raise AssertionError(f"{where}: streamed\n  alone {alone.streamed}\n  there {other.streamed}")
    for rank, (one, two) in enumerate(zip(alone.hypotheses, other.hypotheses, strict=True)):
        first, second = (0.0 if score is None else score for score in (one.score, two.score))
        # Scores may be -inf alike, where only an impossible token was left.
        near = first == second or abs(first - second) <= tolerance
        if (one.score is None) is not (two.score is None) or not near:
            raise AssertionError(f"{where}: sequence {rank} scores {two.score}, alone {one.score}")
        if one.unmet != two.unmet:
            raise AssertionError(f"{where}: sequence {rank} does not meet {two.unmet}, alone {one.unmet}")
        if one.beams != two.beams:
            raise AssertionError(f"{where}: sequence {rank} came by beams {two.beams}, alone {one.beams}")
    _compare_logits(alone.logits, other.logits, where, tolerance)


def _compare_logits(
    alone: Mapping[tuple[int, ...], Tensor],
    other: Mapping[tuple[int, ...], Tensor],
    where: str,
    tolerance: float,
) -> None:
    if alone.keys() != other.keys():
        odd = sorted(alone.keys() ^ other.keys(), key=len)[0]
        whose = "alone" if odd in alone else "there"
        raise AssertionError(f"{where}: a row stood at {list(odd)} only {whose}")
    for prefix, logits in alone.items():
        if not torch.allclose(logits, other[prefix], rtol=0.0, atol=tolerance, equal_nan=True):
            far = (logits - other[prefix]).abs().max()
            raise AssertionError(
                f"{where}: logits after {list(prefix)} differ by {far:.3g}, more than {tolerance}"
            )


def _ending(outcome: Outcome) -> str:
    return "sequences" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
