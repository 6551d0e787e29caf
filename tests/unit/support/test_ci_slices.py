"""What CI leaves out; the cases that it runs of a wide test have every value among them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.ci_slices import MODELS, cover, fewer_models, first, mark

TESTS = Path(__file__).parents[2]


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


class Item(SimpleNamespace):
    """A collected test with as much of pytest's interface as the slicer reads."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((each for each in self.marks if each.name == name), None)

    def add_marker(self, decorator: pytest.MarkDecorator) -> None:
        self.marks.append(decorator.mark)


def items(file: str, names: list[str], *marks: pytest.MarkDecorator) -> list[Item]:
    found = []
    for name in names:
        parameters = SimpleNamespace(params={"name": name})
        node = f"{file}::test_it[{name}]"
        found.append(
            Item(
                nodeid=node,
                path=TESTS / file,
                callspec=parameters,
                marks=[each.mark for each in marks],
                fixturenames=["tiny"],
            )
        )
    return found


def test_what_ci_leaves_out_is_marked_slow() -> None:
    listed = items("unit/test_a.py", ["x", "y", "z"], pytest.mark.ci_cases("x", "z"))
    weekly = items("unit/bench/test_b.py", ["x"])
    wide = items("contracts/test_c.py", [str(n) for n in range(9)])
    for item in wide:
        item.callspec.params["name"] = int(item.callspec.params["name"]) // 3
    mark([*listed, *weekly, *wide], TESTS, whole=True)
    slow = [item.get_closest_marker("slow") is not None for item in [*listed, *weekly]]
    assert slow == [False, True, False, True]
    run = [item for item in wide if item.get_closest_marker("slow") is None]
    assert sorted(item.callspec.params["name"] for item in run) == [0, 1, 2]


def test_a_listed_case_that_does_not_exist_is_refused() -> None:
    """A case that is renamed must not leave CI unnoticed."""
    listed = items("unit/test_a.py", ["x", "y"], pytest.mark.ci_cases("x", "w"))
    with pytest.raises(pytest.UsageError, match=r"unit/test_a.py::test_it .*: \['w'\]"):
        mark(listed, TESTS, whole=True)
    mark(listed[:1], TESTS, whole=False)
    assert listed[0].get_closest_marker("slow") is None


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
        assert len(taken[-1]) >= MODELS
    assert len(set().union(*taken)) > 4
