"""Which cases of a wide test CI runs: as few as have every value of every parameter among them.

The other cases are marked `slow`: `pytest -m slow` runs them, `pytest -m ""` runs everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.support import tiny_models
from tests.support.ci_cases import CI_CASES

__all__ = ["cover", "fewer_models", "first", "pick", "sample"]

WIDE = 8  # a test with at most so many cases runs whole
MODELS = 4  # of the models that a test compares with the reference in turn; other tests take others
MODEL_FIXTURES = {"deep", "real", "reference", "tiny"}  # a case with one of them takes long


def first(count: int, whole: int) -> list[Any]:
    """The numbers of `whole` cases: the first `count` always run, the rest are slow."""
    return [n if n < count else pytest.param(n, marks=pytest.mark.slow) for n in range(whole)]


def cover(cases: Mapping[str, set[tuple[str, str]]]) -> set[str]:
    """Names of cases that together have every value of every case, chosen greedily.

    Equal ones are chosen by a hash of their names, so that few change sides when others come and go.
    """
    ordered = sorted(cases, key=lambda name: crc32(name.encode()))
    missing = set().union(*cases.values())
    chosen: set[str] = set()
    while missing:
        best = max(ordered, key=lambda name: len(cases[name] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def pick(items: Iterable[pytest.Item], tests: Path) -> None:
    """Mark slow what `CI_CASES` does not name of the tests that it lists; `tests` is their common folder."""
    for item in items:
        name, _, case = item.nodeid.partition("[")
        listed = CI_CASES.get(f"{item.path.relative_to(tests).as_posix()}::{name.rpartition('::')[2]}")
        if listed is not None and case.removesuffix("]") not in listed:
            item.add_marker(pytest.mark.slow)


def fewer_models(family: str, cases: Mapping[str, set[tuple[str, str]]]) -> dict[str, set[tuple[str, str]]]:
    """The cases, of whose models only a few must be among those chosen: others for each test, by a hash."""
    models = {
        pair for pairs in cases.values() for pair in pairs if pair[1].strip("'") in tiny_models.ARCHITECTURES
    }
    ordered = sorted(models, key=lambda pair: crc32(f"{family} {pair[1]}".encode()))
    return {name: pairs - set(ordered[MODELS:]) for name, pairs in cases.items()}


def sample(items: Iterable[pytest.Item], folders: Iterable[Path]) -> None:
    """Mark the surplus cases of wide tests slow: those below `folders`, and all that run a model."""
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    folders = tuple(folders)
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("slow") is not None:
            continue
        runs_model = MODEL_FIXTURES & set(getattr(item, "fixturenames", ()))
        if runs_model or any(item.path.is_relative_to(folder) for folder in folders):
            families[item.nodeid.partition("[")[0]][item.nodeid] = item
    for family, cases in families.items():
        if len(cases) > WIDE:
            values = {
                name: {(parameter, repr(value)) for parameter, value in item.callspec.params.items()}
                for name, item in cases.items()
            }
            if any("reference" in item.fixturenames for item in cases.values()):
                values = fewer_models(family, values)
            for name in cases.keys() - cover(values):
                cases[name].add_marker(pytest.mark.slow)
