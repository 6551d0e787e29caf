"""One case on one model, all ways in turn, repeat after repeat."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.case import Case, Prompts
from bench.forward_counter import Tally
from bench.implementations import BARE, CONTENDERS, OURS, THEIRS
from bench.peak import Peak

__all__ = ["Result", "run"]


@dataclass(frozen=True)
class Result:
    """What one way came to in one case. Times are CPU time; ratios are medians of each repeat's ratio."""

    model: str
    case: str
    way: str
    repeats: int
    steps: int  # tokens decoded for each row
    ratio: float  # time / the bare loop's
    low: float  # the ratio's first quartile
    high: float  # and third
    best: float  # fastest repeat / the bare loop's fastest: neighbours on the machine disturb it least
    step: float  # milliseconds a step
    over: float  # milliseconds a step on top of the bare loop
    gain: float  # transformers' time / this one's
    peak: int | None  # bytes of memory on top of what the process held
    forwards: int
    fed: int  # positions fed, padding included
    same: bool | None  # the same tokens as transformers; None where this way decodes otherwise


@dataclass(frozen=True)
class _Sight:
    """What is looked at outside the clock."""

    tokens: Tensor
    peak: int | None
    forwards: int
    fed: int


def run(model: Any, name: str, case: Case, new: int, repeats: int) -> list[Result]:
    """Every way `repeats` times, taking turns in a rotating order; a result for each."""
    prompts = case.prompts(model.config.vocab_size)
    sights = {way: _looked(way, model, case, prompts, new) for way in CONTENDERS}
    times: dict[str, list[float]] = {way: [] for way in CONTENDERS}
    ways = list(CONTENDERS)
    gc.collect()
    gc.freeze()  # what exists by now is not searched for garbage again
    try:
        for repeat in range(repeats):
            turn = repeat % len(ways)
            for way in ways[turn:] + ways[:turn]:
                times[way].append(_timed(way, model, case, prompts, new))
    finally:
        gc.unfreeze()
    return [_result(name, case, new, way, times, sights) for way in CONTENDERS]


def _looked(way: str, model: Any, case: Case, prompts: Prompts, new: int) -> _Sight:
    """A first run, which also warms up."""
    CONTENDERS[way](model, case, prompts, 2)
    gc.collect()
    torch.manual_seed(0)
    with Tally(model) as tally, Peak() as peak:
        tokens = CONTENDERS[way](model, case, prompts, new)
    if tokens.shape != (len(case.lengths), new) or bool((tokens == model.config.vocab_size - 1).any()):
        raise RuntimeError(f"{way} ended a row of {case.name} early: its times cannot be compared")
    return _Sight(tokens, peak.bytes, tally.forwards, tally.fed)


def _timed(way: str, model: Any, case: Case, prompts: Prompts, new: int) -> float:
    """The CPU seconds of one run."""
    gc.collect()
    torch.manual_seed(0)
    start = time.process_time()
    CONTENDERS[way](model, case, prompts, new)
    return time.process_time() - start


def _result(
    name: str,
    case: Case,
    new: int,
    way: str,
    times: Mapping[str, Sequence[float]],
    sights: Mapping[str, _Sight],
) -> Result:
    mine, sight = times[way], sights[way]
    ratios = _ratios(mine, times[BARE])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    alike = way in (OURS, THEIRS) or (case.greedy and case.level)
    return Result(
        model=name,
        case=case.name,
        way=way,
        repeats=len(mine),
        steps=new,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        best=min(mine) / min(times[BARE]),
        step=statistics.median(mine) / new * 1e3,
        over=statistics.median(a - b for a, b in zip(mine, times[BARE], strict=True)) / new * 1e3,
        gain=statistics.median(_ratios(times[THEIRS], mine)),
        peak=sight.peak,
        forwards=sight.forwards,
        fed=sight.fed,
        same=torch.equal(sight.tokens, sights[THEIRS].tokens) if alike else None,
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]
