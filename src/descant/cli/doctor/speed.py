"""Times of Descant and of transformers in one process, in turns, and of vLLM in a process of its own."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.cli.doctor.parity import ParityCase, pad_token, quiet
from descant.cli.doctor.report import SpeedRow, one_line
from descant.cli.doctor.subject import PaddedPrompts, Subject, token_prompts
from descant.cli.doctor.vllm_process import VllmCase, run_vllm

__all__ = ["SPEED_CASES", "SpeedSize", "run_speed"]

SPEED_CASES: Final = (
    ParityCase("greedy 1", (32,)),
    ParityCase("greedy 16", (32,) * 16),
    ParityCase("ragged 16", tuple(range(2, 33, 2))),
    ParityCase("beams 4", (64,), {"num_beams": 4}),
)
OURS, THEIRS, VLLM = "descant", "transformers", "vllm"


@dataclass(frozen=True)
class SpeedSize:
    """How long the benchmark takes."""

    new_tokens: int = 32
    max_repeats: int = 7
    seconds: float = 10.0  # of a case: no repeat starts later

    @classmethod
    def quick(cls) -> SpeedSize:
        """A second or two for each case of a small model."""
        return cls(new_tokens=16, max_repeats=3, seconds=2.0)


@dataclass(frozen=True)
class _Timed:
    """The times of one implementation, and its tokens."""

    seconds: list[float]
    tokens: Tensor


def run_speed(
    subject: Subject, size: SpeedSize, with_vllm: bool, progress: Callable[[str], None]
) -> Iterator[SpeedRow]:
    """The times of all implementations in every case."""
    if subject.model.config.is_encoder_decoder:
        detail = "the prompts of the doctor are for models without an encoder"
        yield SpeedRow(subject.name, "all", OURS, None, None, "", 0, detail)
        return
    times: dict[str, float] = {}
    for case in SPEED_CASES:
        progress(f"bench, {subject.name}: {case.name}")
        try:
            timed = _run_case(subject.model, case, size)
        except Exception as error:  # out of memory, a missing kernel
            detail = one_line(f"{type(error).__name__}: {error}", 200)
            yield SpeedRow(subject.name, case.name, f"{OURS}, {THEIRS}", None, None, "", 0, detail)
            continue
        times[case.name] = statistics.median(timed[THEIRS].seconds)
        yield from _rows(subject.name, case, size, timed)
    if with_vllm:
        progress(f"bench, {subject.name}: {VLLM}")
        yield from _vllm_rows(subject, size, times)


def _run_case(model: Any, case: ParityCase, size: SpeedSize) -> Mapping[str, _Timed]:
    """Both implementations in turns, in an order that changes; the first run of each is not counted."""
    pad = pad_token(model)
    prompts = PaddedPrompts.of(token_prompts(model, case.lengths), model, pad)
    arguments = {
        "input_ids": prompts.ids,
        "attention_mask": prompts.mask,
        "do_sample": False,
        "min_new_tokens": size.new_tokens,
        "max_new_tokens": size.new_tokens,
        "pad_token_id": pad,
        **case.arguments,
    }
    calls: dict[str, Callable[[], Any]] = {
        OURS: partial(generate, model, **arguments),
        THEIRS: partial(model.generate, **arguments),
    }
    with quiet():
        timed = {name: _Timed([], call()[:, prompts.ids.shape[1] :].cpu()) for name, call in calls.items()}
        gc.collect()
        start = time.perf_counter()
        for repeat in range(size.max_repeats):
            names = list(calls) if repeat % 2 == 0 else list(calls)[::-1]
            for name in names:
                timed[name].seconds.append(_seconds(calls[name], model.device))
            if time.perf_counter() - start > size.seconds:
                break
    return timed


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def _rows(model: str, case: ParityCase, size: SpeedSize, timed: Mapping[str, _Timed]) -> Iterator[SpeedRow]:
    is_same = torch.equal(timed[OURS].tokens, timed[THEIRS].tokens)
    num_tokens = size.new_tokens * len(case.lengths)
    for name, one in timed.items():
        pairs = zip(timed[THEIRS].seconds, one.seconds, strict=True)
        yield SpeedRow(
            model,
            case.name,
            name,
            ms_per_token=1e3 * statistics.median(one.seconds) / num_tokens,
            speedup=statistics.median(theirs / own for theirs, own in pairs),
            tokens="same" if is_same else "other",
            repeats=len(one.seconds),
        )


def _vllm_rows(subject: Subject, size: SpeedSize, times: Mapping[str, float]) -> Iterator[SpeedRow]:
    """The times of vLLM, or one row with the reason why there are none."""
    cases = [case for case in SPEED_CASES if not case.arguments]
    prompts = {case.name: token_prompts(subject.model, case.lengths) for case in cases}
    given = [VllmCase(name, some, size.new_tokens, size.max_repeats) for name, some in prompts.items()]
    found = run_vllm(subject, given)
    if isinstance(found, str):
        yield SpeedRow(subject.name, "all", VLLM, None, None, "", 0, found)
        return
    for case in cases:
        seconds = found[case.name]
        middle = statistics.median(seconds)
        yield SpeedRow(
            subject.name,
            case.name,
            VLLM,
            ms_per_token=1e3 * middle / (size.new_tokens * len(case.lengths)),
            speedup=times[case.name] / middle if case.name in times else None,
            tokens="",
            repeats=len(seconds),
        )
