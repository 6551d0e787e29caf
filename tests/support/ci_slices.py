"""The slice of a wide sweep that CI runs: a share of its cases, in which no value of a parameter is missing.

The rest is marked `battery`: `pytest -m battery` runs it, `pytest -m "battery or not battery"` everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

__all__ = ["cut", "first"]

WIDE = 24  # cases of one test that are few enough to be run whole


def first(count: int, whole: int) -> list[Any]:
    """The numbers of `whole` cases: the first `count` always, the rest only in the battery."""
    return [n if n < count else pytest.param(n, marks=pytest.mark.battery) for n in range(whole)]


def cut(items: Iterable[pytest.Item], folder: Path, share: int) -> None:
    """Leave a `share`-th of the cases of each wide test below a folder, and the rest to the battery.

    Chosen by their names, so that few cases change sides when others come and go.
    """
    families: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(folder) and hasattr(item, "callspec"):
            families[item.nodeid.partition("[")[0]].append(item)
    for cases in families.values():
        cases = [one for one in cases if one.get_closest_marker("battery") is None]
        if len(cases) <= WIDE:
            continue
        cases.sort(key=lambda one: crc32(one.nodeid.encode()))
        seen: set[tuple[str, str]] = set()
        for place, one in enumerate(cases):
            values = {(name, repr(value)) for name, value in one.callspec.params.items()}
            if place * share >= len(cases) and values <= seen:
                one.add_marker(pytest.mark.battery)
            seen |= values
