"""The contracts of requests: a result does not depend on other requests, order or admission time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from descant.engine.session import Request
from descant.errors import InputError, RowError
from descant.testing.outcome import TOLERANCE, Outcome, Schedule, compare, failing_request, outcomes

__all__ = ["check_admission", "check_batch", "check_seed"]


def check_batch(model: Any, requests: Sequence[Request], tolerance: float = TOLERANCE) -> None:
    """A batch of N equals N batches of 1, and permuting it permutes the results.

    Tokens, finish reasons and streams must be equal, scores and logits within the tolerance. Requests that
    sample need a seed.
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
        actual = outcomes(model, requests, Schedule.at_once(order))
        for index in range(count):
            compare(alone[index], actual[index], f"request {index} in a batch of {count}, {name}", tolerance)


def check_admission(
    model: Any, requests: Sequence[Request], schedules: int = 10, seed: int = 0, tolerance: float = TOLERANCE
) -> None:
    """A result does not depend on the step of admission, nor on requests that end, fail or are cancelled.

    Every schedule admits the requests at random steps together with three more: one that ends after few
    tokens, one that fails, and one that is cancelled.
    """
    alone = _run_alone(model, requests)
    rng = random.Random(seed)
    for number in range(schedules):
        short, failing, cancelled = (rng.choice(requests) for _ in range(3))
        short_config = short.generation_config.replace(
            max_new_tokens=rng.randint(1, 3), min_new_tokens=None, min_length=0
        )
        neighbours = [
            replace(short, generation_config=short_config),
            failing_request(failing, rng.randint(0, 3)),
            cancelled,
        ]
        all_requests = [*requests, *neighbours]
        schedule = Schedule.random(rng, len(all_requests), cancelled=[len(all_requests) - 1])
        actual = outcomes(model, all_requests, schedule)
        for index, expected in enumerate(alone):
            compare(expected, actual[index], f"request {index} in schedule {number}, {schedule}", tolerance)
        _check_failed(actual[len(requests) + 1], f"a neighbour without choice in schedule {number}")


def check_seed(
    model: Any, requests: Sequence[Request], schedules: int = 5, tolerance: float = TOLERANCE
) -> None:
    """A seeded request does not depend on other requests, order, admission time or torch's generator.

    It also does not change torch's generator, and another seed gives other tokens. At least one request must
    sample, with enough tokens that two seeds are unlikely to agree.
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
        for index, (one, two) in enumerate(zip(alone, _run_alone(model, requests), strict=True)):
            compare(one, two, f"request {index} under another seed of torch", tolerance)
        if not torch.equal(before, torch.get_rng_state()):
            raise AssertionError("seeded requests must not use torch's generator")
    finally:
        torch.set_rng_state(state)
    rng = random.Random(len(requests))
    for number in range(schedules):
        schedule = Schedule.random(rng, len(requests))
        for index, actual in enumerate(outcomes(model, requests, schedule)):
            compare(alone[index], actual, f"request {index} in schedule {number}, {schedule}", tolerance)
    _check_seed_matters(model, sampled)


def _check_seed_matters(model: Any, sampled: Sequence[Request]) -> None:
    """Eight seeds must not all give the same tokens."""
    for request in sampled:
        config = request.generation_config
        first = int(config.seed or 0)
        tries = [replace(request, generation_config=config.replace(seed=first + step)) for step in range(8)]
        if len({str(one.tokens) for one in outcomes(model, tries)}) == 1:
            raise AssertionError(f"seeds {first} to {first + 7} all gave the same tokens: is the seed read?")


def _check_failed(outcome: Outcome, label: str) -> None:
    """The request must have failed with a RowError, unless it finished before."""
    if not outcome.hypotheses and not isinstance(outcome.error, RowError):
        raise AssertionError(f"{label} ended with {outcome.error!r}, not with a RowError")


def _run_alone(model: Any, requests: Sequence[Request]) -> list[Outcome]:
    """The outcome of every request in a separate session."""
    for index, request in enumerate(requests):
        config = request.generation_config
        if config.do_sample and config.seed is None:
            raise InputError("requests", f"must be seeded where they sample, number {index} is not", config)
    return [outcomes(model, [request])[0] for request in requests]
