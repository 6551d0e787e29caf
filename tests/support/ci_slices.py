"""What each check runs: the markers `slow`, `heavy` and `reference` of all tests.

CI leaves out what is slow: `pytest -m slow` runs it, `pytest -m ""` runs everything. A file may mark tests
and cases itself. Also slow are the cases that the `ci_cases` of a test does not name, the tests of the
project's own tools, and of a wide test the cases that add no value of a parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.support import tiny_models

__all__ = ["WEEKLY_FOLDERS", "cover", "fewer_models", "first", "mark"]

WIDE = 8  # a test with at most so many cases runs whole
MODELS = 4  # of the models that a test compares with the reference in turn; other tests take others
SAMPLED_FOLDERS = ("contracts", "unit/decoding/guidance")  # wide tests without a model too
WEEKLY_FOLDERS = ("unit/bench", "unit/support", "unit/tools")  # of the project's own tools
# Files of tests/unit that take more than about 11 CPU seconds: CI runs them, the daily check does not.
HEAVY_FILES = frozenset({
    "test_adaptive_warpers", "test_alignment", "test_allowed_sequences", "test_arithmetic",
    "test_backtracking", "test_bounds", "test_compiled_step", "test_constrained", "test_contrastive",
    "test_cross_tokenizer", "test_detokenizer", "test_device_cost", "test_draft_model", "test_evicting",
    "test_fallback", "test_generate_issues", "test_kinds", "test_model_kinds", "test_page",
    "test_prefill", "test_quantized", "test_real", "test_replay", "test_roll_back", "test_scaffold",
    "test_scorers", "test_sink", "test_sizes", "test_speculation", "test_speculation_issues",
    "test_support", "test_svg", "test_token_healing", "test_trust", "test_window",
    "test_windows",
})  # fmt: skip
# Tests with these fixtures, or below `tests/reference`, run transformers 4.52.4.
REFERENCE_FIXTURES = {"reference", "transformers4"}
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


def fewer_models(family: str, cases: Mapping[str, set[tuple[str, str]]]) -> dict[str, set[tuple[str, str]]]:
    """The cases, of whose models only a few must be among those chosen: others for each test, by a hash."""
    models = {
        pair for pairs in cases.values() for pair in pairs if pair[1].strip("'") in tiny_models.ARCHITECTURES
    }
    ordered = sorted(models, key=lambda pair: crc32(f"{family} {pair[1]}".encode()))
    return {name: pairs - set(ordered[MODELS:]) for name, pairs in cases.items()}


def mark(items: Sequence[pytest.Item], tests: Path, *, whole: bool) -> None:
    """Set the markers of collected tests; with `whole`, each function has all its cases among them."""
    slow = pytest.mark.slow
    for item in items:
        if item.path.stem in HEAVY_FILES:
            item.add_marker(pytest.mark.heavy)
        fixtures = set(getattr(item, "fixturenames", ()))
        if REFERENCE_FIXTURES & fixtures or item.path.is_relative_to(tests / "reference"):
            item.add_marker(pytest.mark.reference)
        if any(item.path.is_relative_to(tests / folder) for folder in WEEKLY_FOLDERS):
            item.add_marker(slow)
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    for family, cases in families.items():
        listed = cases[0].get_closest_marker("ci_cases")
        if listed is not None:
            names = [item.nodeid.partition("[")[2].removesuffix("]") for item in cases]
            if whole and (unknown := sorted(set(listed.args) - set(names))):
                raise pytest.UsageError(f"`ci_cases` of {family} names cases that do not exist: {unknown}")
            for name, item in zip(names, cases, strict=True):
                if name not in listed.args:
                    item.add_marker(slow)
        sampled = {item.nodeid: item for item in cases if _is_sampled(item, tests)}
        if len(sampled) > WIDE:
            for name in sampled.keys() - _chosen(family, sampled):
                sampled[name].add_marker(slow)


def _is_sampled(item: pytest.Item, tests: Path) -> bool:
    if not hasattr(item, "callspec") or item.get_closest_marker("slow") is not None:
        return False
    runs_model = MODEL_FIXTURES & set(getattr(item, "fixturenames", ()))
    return bool(runs_model) or any(item.path.is_relative_to(tests / folder) for folder in SAMPLED_FOLDERS)


def _chosen(family: str, cases: Mapping[str, Any]) -> set[str]:
    values = {
        name: {(parameter, repr(value)) for parameter, value in item.callspec.params.items()}
        for name, item in cases.items()
    }
    if any("reference" in item.fixturenames for item in cases.values()):
        values = fewer_models(family, values)
    return cover(values)
