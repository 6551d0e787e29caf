"""The contract of scheduling: tokens do not depend on budgets, chunks, order, preemption or cancellation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Request, Session
from descant.testing.admission_schedule import Schedule
from descant.testing.outcome import TOLERANCE, compare, outcomes

__all__ = ["check_schedule"]


def check_schedule(
    model: Any, requests: Sequence[Request], schedules: int = 10, seed: int = 0, tolerance: float = TOLERANCE
) -> None:
    """A request has the same result under any schedule as alone.

    Every schedule has random budgets for rows, tokens and blocks, as small as the largest request allows,
    random chunks of prompts, priorities, steps of admission, and one request that is cancelled.
    """
    alone = [outcomes(model, [one])[0] for one in requests]
    rng = random.Random(seed)
    for number in range(schedules):
        config = _random_config(rng, model, requests)
        given = [replace(one, priority=rng.randint(-2, 2)) for one in (*requests, rng.choice(requests))]
        schedule = Schedule.random(rng, len(given), cancelled=[len(given) - 1])
        actual = outcomes(model, given, schedule, scheduler=config)
        for index, expected in enumerate(alone):
            compare(expected, actual[index], f"request {index} in schedule {number}, {config}", tolerance)


def _random_config(rng: random.Random, model: Any, requests: Sequence[Request]) -> SchedulerConfig:
    """Budgets under which each of the requests can run."""
    block_size = rng.choice((1, 4, 16))
    sized = SchedulerConfig(block_size=block_size)
    demands = [Session(model, scheduler=sized).demand(one) for one in requests]
    rows = max(one.rows for one in demands)
    tokens = max(max(one.tokens_per_step, one.prompt_tokens) for one in demands)
    blocks = max(one.max_blocks(sized) for one in demands)
    return SchedulerConfig(
        block_size=block_size,
        max_running_rows=rows + rng.choice((0, 2, 8, 100)),
        max_step_tokens=rng.choice((None, tokens, 2 * tokens)),
        chunk_tokens=rng.choice((None, 1, 3, 8)),
        num_blocks=rng.choice((None, blocks, blocks + blocks // 2, 3 * blocks)),
        ageing=rng.choice((0.0, 1.0)),
        preemption=rng.choice(("never", "growth", "priority")),
        headroom=rng.choice((0.0, 0.1)),
    )
