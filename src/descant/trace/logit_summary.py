"""What a step's logits come to in a trace: reduced where they lie, then fetched at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import Observation, Watched
from descant.core.rows import pick
from descant.trace.records import Candidate, Look, Moved, Stage

__all__ = ["Line", "Sight", "fetched", "name_of"]

_SAME = 1e-4  # log-probabilities that differ by less are the same
_SOME = 3  # tokens told of what a processor moved most, and of what it cut
Values = list[Any]  # what `tolist` gives


class Line(NamedTuple):
    """One place where a choice was made, and the tokens that must be told of there."""

    row: int  # of the lane
    at: int  # after which of the row's drafts
    wanted: tuple[int, ...]
    told: int | None = None  # its line of `told.scores`; None: as the lane processed them
    turn: int = 0  # in which of several calls it was processed, of those that had its row


class _Law:
    """Log-probabilities [N, V], and what is asked of them more than once."""

    def __init__(self, scores: Tensor) -> None:
        self.logs = scores.log_softmax(-1)
        self._best: Tensor | None = None

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities."""
        return self.logs.exp()

    def at(self, tokens: Tensor) -> Tensor:
        """The log-probabilities of some tokens [N, n]."""
        return self.logs.gather(1, tokens)

    @cached_property
    def entropy(self) -> Tensor:
        """In nats [N]."""
        found: Tensor = torch.special.entr(self.probs).sum(-1)
        return found

    def best(self, count: int) -> Tensor:
        """The likeliest tokens [N, n]; all who ask in a step ask for as many."""
        best = self.logs.topk(count).indices if self._best is None else self._best
        self._best = best
        return best


class _Laws:
    """The laws of scores in a step, each made once: what one processor made is what the next was given."""

    def __init__(self) -> None:
        # With the scores themselves, so that nothing else comes to lie where they did.
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, _Law]] = {}

    def of(self, scores: Tensor, index: Sequence[int]) -> _Law:
        """The law of some lines of scores [N, V]."""
        key = (scores.data_ptr(), tuple(index))
        if key not in self._known:
            whole = key[1] == tuple(range(len(scores)))
            self._known[key] = (scores, _Law(scores if whole else pick(scores, torch.tensor(index))))
        return self._known[key][1]


@dataclass
class Sight:
    """The lines of one lane, reduced: all that a trace keeps of them, on the device until it is fetched."""

    lines: Sequence[Line]
    top: int
    wanted: Array  # [L, W] tokens, padded
    same: bool  # whether nobody changed what the model said
    parts: list[Tensor] = field(default_factory=list)
    stages: list[tuple[str, list[int]]] = field(default_factory=list)  # names, each with its lines

    @classmethod
    def of(cls, seen: Observation, lines: Sequence[Line], top: int, wrappers: Sequence[str]) -> Sight:
        """What is to be known of these lines; without any candidates but those wanted where `top` is 0.

        `wrappers` [R] are the names of what stands between the network and each row.
        """
        told = None if seen.told is None else seen.told.scores
        wrapped = seen.output.plain is not None
        wide = max((len(line.wanted) for line in lines), default=0)
        padded = [[*line.wanted, *[0] * (wide - len(line.wanted))] for line in lines]
        wanted = np.array(padded, dtype=np.int64).reshape(len(lines), wide)
        same = not seen.watched and not wrapped and told is None
        made = cls(lines, min(top, seen.logits.shape[-1]), wanted, same)
        if not lines:
            return made
        laws, count = _Laws(), seen.logits.shape[1]
        flat = [line.row * count + line.at for line in lines]
        plain = seen.logits.flatten(0, 1)
        raw = processed = laws.of(plain, flat)
        if told is not None:
            processed = laws.of(told, [line.told or 0 for line in lines])
        elif not same:
            processed = laws.of(seen.scores.flatten(0, 1), flat)
        made._weigh(raw, processed)
        if top:
            said = seen.output.logits.flatten(0, 1)
            for name in dict.fromkeys(wrappers[line.row] for line in lines) if wrapped else ():
                mine = [number for number, line in enumerate(lines) if wrappers[line.row] == name]
                index = [flat[number] for number in mine]
                made._watch(name, laws.of(plain, index), laws.of(said, index), mine)
            turns = _turns(seen.watched)
            for one in seen.watched:
                made._stage(one, flat, turns, laws)
        return made

    def _weigh(self, raw: _Law, processed: _Law) -> None:
        """Entropies, the likeliest tokens and those wanted."""
        wanted = torch.from_numpy(self.wanted).to(raw.logs.device, non_blocking=True)
        laws = (raw,) if self.same else (raw, processed)
        self.parts += [law.entropy for law in laws]
        self.parts += [law.at(wanted) for law in laws]
        for law in laws if self.top else ():
            best = law.best(self.top)
            self.parts += [best, *(other.at(best) for other in laws)]

    def _stage(self, one: Watched, flat: Sequence[int], turns: dict[int, list[int]], laws: _Laws) -> None:
        """What one processor did to the lines that it was given."""
        if one.before is one.after:
            return
        where = {} if one.place is None else {place: at for at, place in enumerate(one.place.tolist())}
        mine, places = [], []
        for number, (line, place) in enumerate(zip(self.lines, flat, strict=True)):
            if one.turn:
                place = line.row
                mine_turns = turns.get(place, [])
                if line.turn >= len(mine_turns) or mine_turns[line.turn] != one.turn:
                    continue
            if one.place is None or place in where:
                mine.append(number)
                places.append(place if one.place is None else where[place])
        if mine:
            self._watch(name_of(one.processor), laws.of(one.before, places), laws.of(one.after, places), mine)

    def _watch(self, name: str, before: _Law, after: _Law, mine: Sequence[int]) -> None:
        """What was done to these lines."""
        was, now = before.logs, after.logs
        gone = (now == -torch.inf) & (was > -torch.inf)
        self.stages.append((name, list(mine)))
        self.parts += [
            ((was - now).abs() > _SAME).any(-1),
            (now > -torch.inf).sum(-1),
            gone.sum(-1),
            (before.probs * gone).sum(-1),
        ]
        some = min(_SOME, was.shape[1])
        most = (before.probs - after.probs).abs_().topk(some).indices
        # What was likely before, what it made much of a difference to, and what of it is gone.
        for best in (before.best(self.top), most, was.masked_fill(~gone, -torch.inf).topk(some).indices):
            self.parts += [best, before.at(best), after.at(best)]

    # -------------------------------------------------------------------- on the host
    def looks(self, values: Sequence[Array]) -> list[Look]:
        """The looks of the lines, of the parts as they were fetched."""
        given = iter([_plain(part) for part in values])
        if not self.lines:
            return []
        entropy = next(given)
        left = entropy if self.same else next(given)
        own = next(given)
        made = own if self.same else next(given)
        found: list[list[Candidate]] = [[] for _ in self.lines]
        best: list[tuple[Values, Values, Values]] = []
        for _ in range((1 if self.same else 2) if self.top else 0):
            tokens, raw = next(given), next(given)
            best.append((tokens, raw, raw if self.same else next(given)))
        if len(best) == 2:
            best.reverse()  # the likeliest after the processors first, the others where these are too few
        for number, line in enumerate(self.lines):
            some: dict[int, Candidate] = {}
            for tokens, raw, processed in best:
                for one in zip(tokens[number], raw[number], processed[number], strict=True):
                    likely = one[2] > -math.inf or tokens is best[-1][0]
                    if len(some) < self.top and likely and one[1] > -math.inf:
                        some.setdefault(int(one[0]), Candidate(int(one[0]), one[1], one[2]))
            for at, token in enumerate(line.wanted):
                some.setdefault(token, Candidate(token, own[number][at], made[number][at]))
            found[number] = sorted(some.values(), key=lambda one: (-one.processed, -one.raw))
        stages: list[list[Stage]] = [[] for _ in self.lines]
        for name, mine in self.stages:
            parts = [next(given) for _ in range(13)]
            for place, number in enumerate(mine):
                if parts[0][place]:
                    stages[number].append(_stage(name, [part[place] for part in parts[1:]]))
        return [
            # Of what holds no number there is none.
            Look(
                max(entropy[number], 0.0), max(left[number], 0.0), tuple(found[number]), tuple(stages[number])
            )
            for number in range(len(self.lines))
        ]


def fetched(sights: Sequence[Sight]) -> list[list[Look]]:
    """The looks of several lanes, with one transfer where that costs anything."""
    parts = [part for sight in sights for part in sight.parts]
    if any(part.device.type != "cpu" for part in parts):
        # Tokens are whole numbers that a float32 can hold.
        whole = torch.cat([part.flatten().float() for part in parts]).cpu()
        sizes = [part.numel() for part in parts]
        shapes = [part.shape for part in parts]
        parts = [one.view(shape) for one, shape in zip(whole.split(sizes), shapes, strict=True)]
    arrays = iter([part.numpy() for part in parts])
    return [sight.looks([next(arrays) for _ in sight.parts]) for sight in sights]


def name_of(processor: Any) -> str:
    """What a processor is called: its class, or a function's own name."""
    given = getattr(processor, "function", processor)
    kind = type(given).__name__
    return str(getattr(given, "__name__", kind)) if kind in ("function", "method") else kind


def _turns(watched: Sequence[Watched]) -> dict[int, list[int]]:
    """In which calls each row was processed by a strategy that asks by itself, in order."""
    turns: dict[int, list[int]] = {}
    for one in watched:
        for row in () if not one.turn or one.place is None else one.place.tolist():
            mine = turns.setdefault(row, [])
            if one.turn not in mine:
                mine.append(one.turn)
    return turns


def _plain(part: Array) -> Values:
    """Numbers as they are written: rounded, and -inf for what is none."""
    if part.dtype.kind == "f":
        part = np.where(np.isnan(part), -np.inf, np.round(part.astype(np.float64), 4)) + 0.0
    values: Values = part.tolist()
    return values


def _stage(name: str, parts: Sequence[Any]) -> Stage:
    """What a processor did to one line."""
    kept, cut, mass, *told = parts
    moved: dict[int, Moved] = {}
    for number, (tokens, before, after) in enumerate((told[:3], told[3:6], told[6:])):
        for token, was, now in zip(tokens, before, after, strict=True):
            # The last are those cut, of which there may be fewer; what never was possible was not moved.
            if was > -math.inf and (number < 2 or now == -math.inf):
                moved.setdefault(int(token), Moved(int(token), was, now))
    ordered = tuple(sorted(moved.values(), key=lambda one: (-one.before, -one.after)))
    return Stage(name, int(kept), int(cut), mass if math.isfinite(mass) else 0.0, ordered)
