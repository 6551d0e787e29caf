"""One case on one model: all implementations in turn, for each repeat."""

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
from bench.forward_counter import ForwardCounter
from bench.implementations import BASELINE, IMPLEMENTATIONS, OURS, THEIRS
from bench.peak import Peak

__all__ = ["Result", "run"]


@dataclass(frozen=True)
class Result:
    """The result of one implementation in one case. Times are CPU time, ratios medians over repeats."""

    model: str
    case: str
    implementation: str
    repeats: int
    steps: int  # tokens decoded for each row
    ratio: float  # time / baseline time
    low: float  # first quartile of the ratio
    high: float  # third quartile
    best: float  # fastest repeat / fastest baseline: least disturbed by other processes
    step: float  # milliseconds per step
    overhead: float  # milliseconds per step above the baseline
    speedup: float  # transformers' time / this time
    peak: int | None  # bytes of memory above the start
    forwards: int
    fed: int  # input positions, padding included
    same: bool | None  # the same tokens as transformers; None if the method differs


@dataclass(frozen=True)
class _UntimedRun:
    """Output, memory and forwards of the untimed run."""

    tokens: Tensor
    peak: int | None
    forwards: int
    fed: int


def run(model: Any, name: str, case: Case, new: int, repeats: int) -> list[Result]:
    """Every implementation `repeats` times, in a rotating order; a result for each."""
    prompts = case.prompts(model.config.vocab_size)
    untimed = {one: _run_untimed(one, model, case, prompts, new) for one in IMPLEMENTATIONS}
    times: dict[str, list[float]] = {implementation: [] for implementation in IMPLEMENTATIONS}
    names = list(IMPLEMENTATIONS)
    frozen_before = gc.get_freeze_count() > 0  # by the caller: stays frozen
    gc.collect()
    gc.freeze()  # existing objects are not scanned again
    try:
        for repeat in range(repeats):
            offset = repeat % len(names)
            for implementation in names[offset:] + names[:offset]:
                times[implementation].append(_time_run(implementation, model, case, prompts, new))
    finally:
        if not frozen_before:
            gc.unfreeze()
    return [_result(name, case, new, implementation, times, untimed) for implementation in IMPLEMENTATIONS]


def _run_untimed(implementation: str, model: Any, case: Case, prompts: Prompts, new: int) -> _UntimedRun:
    """The first run, which is also the warm-up."""
    IMPLEMENTATIONS[implementation](model, case, prompts, 2)
    gc.collect()
    torch.manual_seed(0)
    with ForwardCounter(model) as counter, Peak() as peak:
        tokens = IMPLEMENTATIONS[implementation](model, case, prompts, new)
    if tokens.shape != (len(case.lengths), new) or bool((tokens == model.config.vocab_size - 1).any()):
        raise RuntimeError(f"{implementation} ended a row of {case.name} early: its times cannot be compared")
    return _UntimedRun(tokens, peak.bytes, counter.forwards, counter.fed)


def _time_run(implementation: str, model: Any, case: Case, prompts: Prompts, new: int) -> float:
    """The CPU seconds of one run."""
    gc.collect()
    torch.manual_seed(0)
    start = time.process_time()
    IMPLEMENTATIONS[implementation](model, case, prompts, new)
    return time.process_time() - start


def _result(
    name: str,
    case: Case,
    new: int,
    implementation: str,
    times: Mapping[str, Sequence[float]],
    untimed: Mapping[str, _UntimedRun],
) -> Result:
    seconds, inspected = times[implementation], untimed[implementation]
    ratios = _ratios(seconds, times[BASELINE])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    comparable = implementation in (OURS, THEIRS) or (case.greedy and case.equal_lengths)
    return Result(
        model=name,
        case=case.name,
        implementation=implementation,
        repeats=len(seconds),
        steps=new,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        best=min(seconds) / min(times[BASELINE]),
        step=statistics.median(seconds) / new * 1e3,
        overhead=statistics.median(a - b for a, b in zip(seconds, times[BASELINE], strict=True)) / new * 1e3,
        speedup=statistics.median(_ratios(times[THEIRS], seconds)),
        peak=inspected.peak,
        forwards=inspected.forwards,
        fed=inspected.fed,
        same=torch.equal(inspected.tokens, untimed[THEIRS].tokens) if comparable else None,
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]
