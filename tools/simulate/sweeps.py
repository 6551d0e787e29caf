"""The sweeps of the page "Scheduling": load, chunk size, preemption policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tools.simulate.cost_model import CostModel
from tools.simulate.lengths import draw
from tools.simulate.load import LoadResult, Target, simulate

__all__ = ["CHUNKS", "LOADS", "POLICIES", "TARGET", "point", "run_sweeps"]

TARGET = Target(first_token=1.0, between_tokens=0.05)
REQUESTS = 6000
ROWS = 512
LOADS = (10, 20, 30, 35, 40, 45, 50, 60)  # requests a second
SHORT_QUEUE = 30  # requests that may wait, where the queue is bounded
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, None)  # tokens of a step; None: prompts are read whole
CHUNK_RATE = 30
POLICIES = ("never", "growth", "priority")
POLICY_LOADS = (10, 15, 20, 25, 30, 35, 40)
SMALL_POOL = 1 / 12  # of the blocks of one H100: memory is short long before compute is
LEVELS = 3  # priorities
# Long answers of a lower priority fill all rows; what comes after them waits, or takes their place.
LONG_TOKENS, LONG_SHARE, LONG_ROWS, LONG_RATE, LONG_AGEING = 4000, 0.1, 48, 12, 600.0


def shown(result: LoadResult) -> dict[str, Any]:
    """The figures of a point."""
    return {
        "throughput": round(result.throughput, 1),
        "goodput": round(result.goodput, 3),
        "first_token": {name: round(value, 5) for name, value in result.first_token.items()},
        "between_tokens": {name: round(value, 5) for name, value in result.between_tokens.items()},
        "refused": result.refused,
        "preemptions": result.preemptions,
        "reread_tokens": result.reread_tokens,
        "steps": result.steps,
        "first_token_by_level": [round(value, 5) for value in result.first_token_by_level],
    }


def point(
    cost: CostModel, rate: float, requests: int = REQUESTS, levels: int = 1, **limits: Any
) -> dict[str, Any]:
    """One point of a sweep: the same requests for every scheduler."""
    limits = {"max_running_rows": ROWS, "max_step_tokens": 2048, **limits}
    service, burstiness = limits.pop("service", "conversation"), limits.pop("burstiness", 1.0)
    work = draw(requests, rate, service=service, burstiness=burstiness, levels=levels, seed=1)
    return shown(simulate(cost, work, TARGET, **limits))


def background(cost: CostModel, policy: str, requests: int = 3000) -> dict[str, Any]:
    """Short urgent requests beside long ones that are not urgent."""
    work = draw(requests, LONG_RATE, seed=2)
    long = np.random.default_rng(2).random(requests) < LONG_SHARE
    work = work._replace(outputs=np.where(long, LONG_TOKENS, work.outputs), priorities=long.astype(int))
    limits = {"max_running_rows": LONG_ROWS, "max_step_tokens": 2048, "ageing": LONG_AGEING}
    return shown(simulate(cost, work, TARGET, preemption=policy, **limits))


def run_sweeps(costs: Mapping[str, CostModel]) -> dict[str, Any]:
    """Every point of every picture."""
    h100 = costs["h100"]
    small = int(h100.kv_tokens // 16 * SMALL_POOL)
    arrivals: Mapping[str, Mapping[str, Any]] = {
        "Poisson": {},
        "bursts": {"burstiness": 16.0},
        "bounded queue": {"max_waiting": SHORT_QUEUE},
    }
    load = {
        name: [{"rate": rate, **point(h100, rate, **limits)} for rate in LOADS]
        for name, limits in arrivals.items()
    }
    chunk = [{"tokens": tokens, **point(h100, CHUNK_RATE, max_step_tokens=tokens)} for tokens in CHUNKS]
    policy = {
        name: [
            {"rate": rate, **point(h100, rate, levels=LEVELS, num_blocks=small, preemption=name, ageing=10.0)}
            for rate in POLICY_LOADS
        ]
        for name in POLICIES
    }
    long = {name: background(h100, name) for name in POLICIES}
    return {
        "target": [TARGET.first_token, TARGET.between_tokens],
        "load": load,
        "chunk": chunk,
        "policy": policy,
        "background": long,
    }
