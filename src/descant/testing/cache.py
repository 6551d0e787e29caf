"""The law of caches: each equals the obvious one, a list of positions for every row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from descant.core.interfaces import KVCache
from descant.engine.session import Request
from descant.errors import MissingExtra
from descant.testing.admission_schedule import Schedule
from descant.testing.cache_fuzzer import CacheFuzzer
from descant.testing.cache_pair import CacheTraits
from descant.testing.operations import operation_lists
from descant.testing.outcome import TOLERANCE, compare, outcomes
from descant.testing.reference_cache import ReferenceCache, Retention

__all__ = ["CacheTraits", "ReferenceCache", "check_cache", "check_generation"]


def check_cache(
    make_cache: Callable[[], KVCache],
    examples: int = 200,
    retention: Retention | str | None = None,
    error: float | None = None,
    traits: CacheTraits = CacheTraits(),  # noqa: B008 - frozen
) -> None:
    """Any sequence of operations leaves every row's keys and values equal to ListCache's.

    The operations are those of the loop and of whoever holds a cache: empty rows are appended; forwards
    write to all or some rows, level or ragged, several between two commits, or the first layers alone; a
    commit reorders, forks, drops and cuts; rows are selected into a cache of their own, caches are joined,
    moved, written down and read again; and all of them go on. What a cache says of itself must be so.
    A failure is shrunk to the shortest trace.

    `keeps` is for a cache that forgets: of a row's positions, those that it shows, in the order of their
    slots; one for all layers or for each its own, and "own" where the cache decides by what is looked at.
    `error` is for a cache that rounds: how far a number may be off, all of which are from -4 to 4.
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
    def holds(trace: Any) -> None:
        CacheFuzzer(make_cache, traits).run(trace)

    holds()


def check_generation(
    make_cache: Callable[[], KVCache],
    model: Any,
    requests: Sequence[Request],
    schedules: int = 3,
    tolerance: float = TOLERANCE,
) -> None:
    """Whole generations on the cache equal those on a ListCache: admitted at once, and by chance."""
    rng = random.Random(len(requests))
    count = len(requests)
    plans = [Schedule.at_once(range(count))]
    plans += [Schedule.random(rng, count + 1, cancelled=[count]) for _ in range(schedules)]
    for number, schedule in enumerate(plans):
        whole = [*requests, requests[number % count]]
        expected = outcomes(model, whole, schedule, ReferenceCache())
        found = outcomes(model, whole, schedule, make_cache())
        for place in range(count):
            where = f"request {place} in schedule {number}, against a ListCache"
            compare(expected[place], found[place], where, tolerance)
