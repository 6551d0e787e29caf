"""`python -m bench.scheduling`: a long prompt beside rows that decode, and ragged requests in one engine.

`gap`: a prompt of 2,048 tokens comes while 8 rows decode. The figures are the longest time between two tokens
of a running row, by the time of a decode step before the prompt came, with chunks and without, and the time
of the whole by that without. `--half-context` is where attention costs as much as the products: by operations
after 3,072 tokens for SmolLM2 (106 million weights x 2 by 30 layers x 576 x 4), by time on a CPU earlier.

`ragged`: requests with prompts of 8 to 128 tokens and 4 to 64 new tokens. The figures are the times of
transformers' padded `generate` and of its continuous batching by that of one session, plain, and with
prepacked weights and compiled layers. The sides take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers

import descant
from bench.models import fast_copy

__all__ = ["main", "measure_gap", "measure_ragged"]

_NUM_ROWS = 8
_STEPS_BEFORE = 12  # decode steps before the long prompt comes
_NUM_BLOCKS = 1024  # of the KV pool
_STEPS_AFTER = 24  # tokens of the running rows after it is read, at least


class Gap(NamedTuple):
    """One run of the long prompt: CPU seconds of a decode step, of the longest gap, and of the whole."""

    decode_step: float
    longest: float
    total: float


def _config(new: int) -> descant.GenerationConfig:
    return descant.GenerationConfig(max_new_tokens=new, min_new_tokens=new, eos_token_id=None)


def measure_gap(
    model: Any, prompt: Sequence[int], chunk: int | None, new: int, half_context: int | None = None
) -> Gap:
    """Decode rows of `new` tokens each, beside which a prompt is read in chunks; None: at once."""
    config = descant.SchedulerConfig(
        chunk_tokens=chunk,
        chunk_half_context=half_context,
        max_step_tokens=None if half_context is None else chunk,
        num_blocks=_NUM_BLOCKS,  # so on the paged cache
    )
    session = descant.Session(model, scheduler=config)
    rng = random.Random(0)
    running = session.admit(
        *(
            descant.Request([rng.randrange(10, 1000) for _ in range(16)], _config(new))
            for _ in range(_NUM_ROWS)
        )
    )
    began = last = time.process_time()
    gaps: list[float] = []
    step = 0
    while len(session):
        if step == _STEPS_BEFORE:
            session.admit(descant.Request(list(prompt), _config(4)))
        events = session.step()
        now = time.process_time()
        tokens = [
            one for event in events if isinstance(event, descant.Tokens) for one in event.request.tolist()
        ]
        if running[0] in tokens:
            gaps.append(now - last)
            last = now
        step += 1
    decode = statistics.median(gaps[3:_STEPS_BEFORE])
    return Gap(decode, max(gaps[3:]), time.process_time() - began)


def _report_gap(model: Any, given: argparse.Namespace) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(10, 1000) for _ in range(given.prompt)]
    new = _STEPS_BEFORE + _STEPS_AFTER + 2 * (given.prompt // given.chunk)
    shrinking = f"steps of {given.chunk} tokens, chunks of half after {given.half_context}"
    sides: dict[str, tuple[int | None, int | None]] = {
        "whole prompt": (None, None),
        f"chunks of {given.chunk}": (given.chunk, None),
        shrinking: (given.chunk, given.half_context),
    }
    runs: dict[str, list[Gap]] = {name: [] for name in sides}
    measure_gap(model, prompt, None, 4)  # what is measured or compiled once is not counted
    for _ in range(given.repeats):
        for name, (chunk, half) in sides.items():
            runs[name].append(measure_gap(model, prompt, chunk, new, half))
    for name, own in runs.items():
        ratio = statistics.median(one.longest / one.decode_step for one in own)
        step = statistics.median(one.decode_step for one in own) * 1000
        total = statistics.median(
            one.total / two.total for one, two in zip(own, runs["whole prompt"], strict=True)
        )
        print(f"gap, {name}: {ratio:.1f} decode steps of {step:.0f} ms; time of the whole {total:.2f}")


def _requests(count: int, seed: int = 2) -> list[tuple[list[int], int]]:
    """Prompts with the number of new tokens of each."""
    rng = random.Random(seed)
    sizes = [(rng.randint(8, 128), rng.randint(4, 64)) for _ in range(count)]
    return [([rng.randrange(10, 1000) for _ in range(length)], new) for length, new in sizes]


def _run_session(model: Any, requests: Sequence[tuple[list[int], int]]) -> float:
    """The seconds of one session."""
    began = time.monotonic()
    session = descant.Session(model)
    session.admit(*(descant.Request(prompt, _config(new)) for prompt, new in requests))
    for _ in session.drain():
        pass
    return time.monotonic() - began


def _run_padded(model: Any, requests: Sequence[tuple[list[int], int]]) -> float:
    """The seconds of a padded batch, which decodes as long as its longest request."""
    width = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    new = max(new for _, new in requests)
    began = time.monotonic()
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=mask, **settings)
    return time.monotonic() - began


def _run_continuous(model: Any, requests: Sequence[tuple[list[int], int]]) -> float:
    """The seconds of transformers' continuous batching, without the time to allocate its cache."""
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pool = transformers.ContinuousBatchingConfig(num_blocks=2 * len(requests), max_batch_tokens=2048)
    manager = model.init_continuous_batching(settings, continuous_batching_config=pool)
    manager.start()
    try:
        manager.add_request(requests[0][0], max_new_tokens=2)  # its first request waits for the cache
        manager.get_result(timeout=120)
        began = time.monotonic()
        for prompt, new in requests:
            manager.add_request(prompt, max_new_tokens=new)
        for _ in requests:
            if manager.get_result(timeout=300) is None:
                raise TimeoutError("continuous batching gave no result in 300 s")
        return time.monotonic() - began
    finally:
        manager.stop(block=True)


def measure_ragged(model: Any, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """For a session, plain and fast: the median time of each other side by its own."""
    requests, fast = _requests(count), fast_copy(model)
    sides: dict[str, Callable[[], float]] = {
        "session": lambda: _run_session(model, requests),
        "fast session": lambda: _run_session(fast, requests),
        "padded generate": lambda: _run_padded(model, requests),
        "continuous batching": lambda: _run_continuous(model, requests),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(sides[name]())
    return {
        own: {
            name: statistics.median(one / two for one, two in zip(values, seconds[own], strict=True))
            for name, values in seconds.items()
            if name != own
        }
        for own in ("session", "fast session")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of one or both parts."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=("gap", "ragged"))
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--half-context", type=int, default=2048)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    if given.part == "gap":
        _report_gap(model, given)
        return
    with torch.no_grad():
        for own, ratios in measure_ragged(model, given.count, given.repeats).items():
            for name, ratio in ratios.items():
                print(f"ragged, {name} by {own}: {ratio:.2f}")


if __name__ == "__main__":
    main()
