"""The contract of caches: each equals the reference cache, a list of positions per row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from descant.core.interfaces import KVCache
from descant.engine.session import Request
from descant.errors import MissingExtra
from descant.testing.cache_fuzzer import CacheFuzzer, CacheTraits, operation_lists
from descant.testing.outcome import TOLERANCE, Schedule, compare, outcomes
from descant.testing.reference_cache import ReferenceCache, Retention

__all__ = ["CacheTraits", "ReferenceCache", "check_cache", "check_generation"]


def check_cache(
    make_cache: Callable[[], KVCache],
    examples: int = 200,
    retention: Retention | str | None = None,
    error: float | None = None,
    traits: CacheTraits = CacheTraits(),  # noqa: B008 - frozen
) -> None:
    """Any sequence of operations leaves every row's keys and values equal to those of ReferenceCache.

    The operations are those of the engine and of cache owners: append empty rows; forwards that write to all
    or some rows, uniform or ragged, several between two commits, or only the first layer; commits that
    reorder, fork, drop and truncate; select rows into another cache; join, move, save and load caches. All
    caches stay in use. The reported lengths and sizes must be right. A failure is shrunk to the shortest list
    of operations.

    `retention` is for an evicting cache: it maps a row's positions to the visible ones, in slot order; one
    for all layers or one per layer, or "own" if the cache decides by attention. `error` is for a quantized
    cache: the maximum error of a value, where all values are between -4 and 4.
    """
    try:
        from hypothesis import HealthCheck, given, settings, strategies
    except ImportError:
        raise MissingExtra("testing", "check_cache") from None
    traits = replace(
        traits,
        retention=traits.retention if retention is None else retention,
        error=traits.error if error is None else error,
    )

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation_lists(strategies))
    def check_operations(operations: Any) -> None:
        CacheFuzzer(make_cache, traits).run(operations)

    check_operations()


def check_generation(
    make_cache: Callable[[], KVCache],
    model: Any,
    requests: Sequence[Request],
    schedules: int = 3,
    tolerance: float = TOLERANCE,
) -> None:
    """Generation with the cache equals generation with ReferenceCache, for several admission schedules."""
    rng = random.Random(len(requests))
    count = len(requests)
    schedule_list = [Schedule.at_once(range(count))]
    schedule_list += [Schedule.random(rng, count + 1, cancelled=[count]) for _ in range(schedules)]
    for number, schedule in enumerate(schedule_list):
        all_requests = [*requests, requests[number % count]]
        expected = outcomes(model, all_requests, schedule, ReferenceCache())
        actual = outcomes(model, all_requests, schedule, make_cache())
        for index in range(count):
            label = f"request {index} in schedule {number}, against ReferenceCache"
            compare(expected[index], actual[index], label, tolerance)
