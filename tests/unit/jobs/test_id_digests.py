"""Ids of rows: equal ones are found by digests of eight bytes, and equal digests alone are no error."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant import InputError
from descant.jobs import source
from descant.jobs import source as id_digests
from descant.jobs.source import IdDigests, JobSource

IDS = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 30).map(str), st.just("\ud800")), max_size=15)


def write_ids(folder: Path, ids: list[Any]) -> JobSource:
    (folder / "a.jsonl").write_text("".join(json.dumps({"k": one}) + "\n" for one in ids))
    return JobSource([str(folder / "a.jsonl")], "k")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(IDS)
def test_the_first_two_rows_that_share_an_id_are_named(tmp_path: Path, ids: list[Any]) -> None:
    found = write_ids(tmp_path, ids)
    pairs = [(ids.index(one), row) for row, one in enumerate(ids) if ids.index(one) < row]
    if not pairs:
        assert found.scan(3).rows == len(ids)
        return
    first, second = pairs[0]
    with pytest.raises(InputError, match=rf"\(rows {first} and {second} share one\)"):
        found.scan(3)


def test_different_ids_of_equal_digests_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (id_digests, source):
        monkeypatch.setattr(module, "id_digest", lambda one: len(str(one)))
    monkeypatch.setattr(id_digests, "_GROUP", 1)  # several passes
    ids = [1, 2, 3, 10, 11, 12, 100, 101]
    assert write_ids(tmp_path, ids).scan(3).rows == 8
    with pytest.raises(InputError, match=r"\(rows 4 and 8 share one\)"):
        write_ids(tmp_path, [*ids, 11]).scan(3)


def test_an_id_takes_eight_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(0)
    monkeypatch.setattr(id_digests, "id_digest", lambda _: numbers.getrandbits(64))
    digests = IdDigests()
    count = 200_000
    tracemalloc.start()
    for _ in range(count):
        digests.add(0)
    assert list(digests.repeated()) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * count
