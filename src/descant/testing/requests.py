"""The laws of requests: nobody's result depends on who else is there, in which order, or since when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from descant.engine.session import Request
from descant.errors import InputError, RowError
from descant.testing.admission_schedule import Schedule, failing_request
from descant.testing.outcome import TOLERANCE, Outcome, compare, outcomes

__all__ = ["check_admission", "check_batch", "check_seed"]


def check_batch(model: Any, requests: Sequence[Request], tolerance: float = TOLERANCE) -> None:
    """A batch of N equals N batches of 1, and permuting it permutes the results.

    Tokens, ends and streams must be equal, scores and logits within the tolerance. Requests that sample
    need a seed.
    """
    alone = _run_alone(model, requests)
    count = len(requests)
    orders = {
        "as given": list(range(count)),
        "reversed": list(range(count))[::-1],
        "rotated": [*range(1, count), 0],
        "shuffled": random.Random(count).sample(range(count), count),
    }
    for name, order in orders.items():
        found = outcomes(model, requests, Schedule.at_once(order))
        for place in range(count):
            compare(alone[place], found[place], f"request {place} in a batch of {count}, {name}", tolerance)


def check_admission(
    model: Any, requests: Sequence[Request], schedules: int = 10, seed: int = 0, tolerance: float = TOLERANCE
) -> None:
    """Admitted mid-flight equals admitted first; a neighbour that ends, fails or is cancelled is no matter.

    Every schedule admits the requests at random steps among neighbours made from them: one that ends
    after few tokens, one that fails, one that is cancelled.
    """
    alone = _run_alone(model, requests)
    rng = random.Random(seed)
    for number in range(schedules):
        short, broken, doomed = (rng.choice(requests) for _ in range(3))
        few = short.generation_config.replace(
            max_new_tokens=rng.randint(1, 3), min_new_tokens=None, min_length=0
        )
        neighbours = [
            replace(short, generation_config=few),
            failing_request(broken, rng.randint(0, 3)),
            doomed,
        ]
        whole = [*requests, *neighbours]
        schedule = Schedule.random(rng, len(whole), cancelled=[len(whole) - 1])
        found = outcomes(model, whole, schedule)
        for place, expected in enumerate(alone):
            compare(expected, found[place], f"request {place} in schedule {number}, {schedule}", tolerance)
        _check_failed(found[len(requests) + 1], f"a neighbour without choice in schedule {number}")


def check_seed(
    model: Any, requests: Sequence[Request], schedules: int = 5, tolerance: float = TOLERANCE
) -> None:
    """A seeded request gives the same whatever its neighbours, its place, its time and torch's generator.

    It also leaves torch's generator as it was, and another seed gives other tokens. Give at least one
    request that samples, with enough tokens that two seeds can hardly agree by chance.
    """
    sampled = [request for request in requests if request.generation_config.do_sample]
    if not sampled:
        raise InputError(
            "requests", "must hold at least one that samples", len(requests), "set do_sample and a seed"
        )
    state = torch.get_rng_state()
    try:
        torch.manual_seed(1)
        alone = _run_alone(model, requests)
        torch.manual_seed(2)
        before = torch.get_rng_state()
        for place, (one, two) in enumerate(zip(alone, _run_alone(model, requests), strict=True)):
            compare(one, two, f"request {place} under another seed of torch", tolerance)
        if not torch.equal(before, torch.get_rng_state()):
            raise AssertionError("seeded requests drew from torch's generator, which is not theirs")
    finally:
        torch.set_rng_state(state)
    rng = random.Random(len(requests))
    for number in range(schedules):
        schedule = Schedule.random(rng, len(requests))
        for place, found in enumerate(outcomes(model, requests, schedule)):
            compare(alone[place], found, f"request {place} in schedule {number}, {schedule}", tolerance)
    _check_seed_matters(model, sampled)


def _check_seed_matters(model: Any, sampled: Sequence[Request]) -> None:
    """The same request under eight seeds does not always say the same."""
    for request in sampled:
        config = request.generation_config
        first = int(config.seed or 0)
        tries = [replace(request, generation_config=config.replace(seed=first + step)) for step in range(8)]
        if len({str(one.tokens) for one in outcomes(model, tries)}) == 1:
            raise AssertionError(f"seeds {first} to {first + 7} all gave the same tokens: is the seed read?")


def _check_failed(outcome: Outcome, where: str) -> None:
    """It may have ended before it came to fail; otherwise it failed as one row does."""
    if not outcome.hypotheses and not isinstance(outcome.error, RowError):
        raise AssertionError(f"{where} ended with {outcome.error!r}, not with a RowError")


def _run_alone(model: Any, requests: Sequence[Request]) -> list[Outcome]:
    """Every request in a session of its own."""
    for place, request in enumerate(requests):
        config = request.generation_config
        if config.do_sample and config.seed is None:
            raise InputError("requests", f"must be seeded where they sample, number {place} is not", config)
    return [outcomes(model, [request])[0] for request in requests]
