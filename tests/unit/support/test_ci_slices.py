"""The cases that CI runs of a wide test have every value among them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.support.ci_cases import CI_CASES
from tests.support.ci_slices import cover, fewer_models, first


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


def test_a_test_takes_some_of_the_models_and_another_test_others() -> None:
    models = ("llama", "gpt2", "mistral", "qwen2", "gemma", "opt", "t5", "bart")
    cases = {f"{a}-{b}": {("name", repr(a)), ("b", str(b))} for a, b in product(models, range(6))}
    taken = []
    for family in ("one", "two", "three"):
        chosen = cover(fewer_models(family, cases))
        values = set().union(*(cases[name] for name in chosen))
        assert {("b", str(b)) for b in range(6)} <= values
        assert len(chosen) == 6
        taken.append({name.partition("-")[0] for name in chosen})
        assert len(taken[-1]) >= 4
    assert len(set().union(*taken)) > 4
