"""The benchmark of watermarks runs, compares scores and reports a missed limit; the store keeps results."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers

from bench import marks
from bench.detection.edits import edit_text
from bench.detection.store import Store
from bench.models import SUBJECTS

SMALL = ["--new", "2", "--steps", "3", "--text", "4", "--repeats", "1", "--batch", "2"]


@pytest.fixture
def small(monkeypatch):
    """A tiny model replaces the real one."""
    monkeypatch.setattr(marks, "load_model", lambda _: SUBJECTS["tiny"].model())
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def test_every_scheme_is_timed_and_the_scores_are_equal(small, capsys):
    assert marks.main([*SMALL, "--share", "99", "--faster", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in lines[2:-1]] == ["none", *marks.MARKS]
    assert sum(line.endswith("  same") for line in lines) == 4
    assert lines[-1] == "all limits are met"


def test_a_missed_limit_fails(small):
    assert marks.main([*SMALL, "--mark", "lefthash", "--share", "-1", "--faster", "0"]) == 1
    assert marks.main([*SMALL, "--mark", "lefthash", "--share", "99", "--faster", "1e9"]) == 1


def test_a_unit_is_computed_once_and_a_stale_claim_is_taken_over(tmp_path: Path):
    store = Store(tmp_path)
    assert store.get("a/b", lambda: [1]) == store.get("a/b", lambda: [2]) == [1]
    assert not store.free("a/b")
    assert store.free("c")
    (tmp_path / "c.claim").write_text(str(2**22 + 1), encoding="utf-8")  # no process has this id
    assert store.free("c")
    assert store.get("c", lambda: 3) == 3
    assert not list(tmp_path.rglob("*.claim"))


def test_edits_change_the_given_share_of_words():
    text, rng = " ".join(f"w{at}" for at in range(50)), random.Random(0)
    assert len(edit_text(text, "deleted", 0.3, [], rng).split()) == 35
    assert edit_text(text, "replaced", 0.1, ["x"], rng).split().count("x") == 5
    mixed = edit_text(text, "reordered", 0.5, [], rng).split()
    assert sorted(mixed) == sorted(text.split())
    assert 20 <= sum(one != other for one, other in zip(mixed, text.split(), strict=True)) <= 25
