"""The benchmark of rows that share a prompt runs, counts, and reports a missed limit."""

from __future__ import annotations

import pytest
import transformers

from bench import beams
from bench.models import SUBJECTS

SMALL = ["--prompt", "128", "--new", "6", "--beams", "3", "--sequences", "3"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A tiny model replaces the real one."""
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: SUBJECTS["tiny"].model()
    )
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def test_it_counts_and_times_both_cases(capsys):
    assert beams.main([*SMALL, "--faster", "0", "--larger", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    copied = [line for line in lines if "slots copied a step" in line]
    assert [line.split(",")[0] for line in copied] == ["beams x 3"] * 3 + ["sequences x 3"] * 3
    assert sum("same tokens: True" in line for line in lines) == 2
    assert sum("as fast as transformers" in line for line in lines) == 2


def test_a_missed_limit_fails(capsys):
    assert beams.main([*SMALL, "--only", "beams", "--faster", "1000", "--larger", "9"]) == 1
    assert beams.main([*SMALL, "--only", "beams", "--faster", "0", "--larger", "0.1"]) == 1
