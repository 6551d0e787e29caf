"""The cases that CI runs of a wide test have every value among them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.ci_cases import CI_CASES
from tests.support.ci_slices import cover, first


def test_every_value_is_covered_by_few_cases() -> None:
    cases = {f"{a}-{b}": {("a", str(a)), ("b", str(b))} for a, b in product(range(3), range(7))}
    chosen = cover(cases)
    assert set().union(*(cases[name] for name in chosen)) == set().union(*cases.values())
    assert len(chosen) == 7


def test_cases_without_a_common_value_are_all_needed() -> None:
    cases = {str(a): {("a", str(a))} for a in range(20)}
    assert cover(cases) == set(cases)


def test_the_first_run_and_the_rest_are_slow() -> None:
    numbers = first(2, 4)
    assert numbers[:2] == [0, 1]
    assert [one.marks[0].name for one in numbers[2:]] == ["slow"] * 2


def test_the_listed_cases_exist(request: pytest.FixtureRequest) -> None:
    """A case that is renamed must not leave CI unnoticed."""
    tests = Path(__file__).parents[2]
    for name in CI_CASES:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (tests / file).read_text(encoding="utf-8"), name
    options = request.config.option
    if options.keyword or options.markexpr != "not slow" or request.config.args != ["tests"]:
        return  # part of the tests: the others are not there
    run = {item.nodeid for item in request.session.items}
    listed = {f"tests/{name}[{case}]" for name, cases in CI_CASES.items() for case in cases}
    assert not listed - run
