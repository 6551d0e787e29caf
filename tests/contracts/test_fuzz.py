"""Config fuzz: any call gives a valid result or an error that names what is wrong with it; nothing else.

CI runs the first of the cases; `pytest tests/contracts/test_fuzz.py -m ""` runs all.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

from descant.config.generation_config import FIELDS
from descant.errors import format_value
from tests.contracts.configs import GOOD, Case, cases
from tests.contracts.verdict import Violation, run

SEED = 1
SLICE, WHOLE, PART = 500, 10_000, 250
PARTS = [
    pytest.param(first, marks=() if first < SLICE else pytest.mark.slow, id=f"{first}-{first + PART - 1}")
    for first in range(0, WHOLE, PART)
]


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """At most 4 GiB more, so that an allocation of all memory fails."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_every_field_that_works_has_sensible_values():
    assert set(GOOD) == set(FIELDS)


@pytest.mark.ci_cases("0-249")
@pytest.mark.parametrize("first", PARTS)
def test_calls_made_by_chance(tiny, first, record_property):
    tally: Counter[str] = Counter()
    wrong = []
    for case in cases(SEED, PART, first):
        try:
            kind, _ = run(case, tiny(case.model))
        except Violation as violation:
            kind = "violation"
            wrong.append(f"{_describe(case)}\n    {violation}")
        tally[kind] += 1
    record_property("tally", dict(tally))
    assert not wrong, f"{len(wrong)} of {PART} calls, {dict(tally)}:\n" + "\n".join(wrong)
    # A generator that only makes mistakes, or none, tests nothing.
    assert tally["accepted"] > PART // 8
    assert tally["refused"] > PART // 8


def _describe(case: Case) -> str:
    given = ", ".join(f"{name}={format_value(one)}" for name, one in case.fields.items())
    return f"case {case.number} on {case.model}: {given}" + (f"; inputs: {case.odd}" if case.odd else "")
