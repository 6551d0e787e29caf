"""The bench of prompt reuse runs, finds the same tokens every way, and says when a bar is missed."""

from __future__ import annotations

import pytest

from bench import reuse


@pytest.fixture
def arguments(tiny):
    return ["--model", str(tiny("llama").folder), "--prefix", "96", "--batch", "2", "--repeats", "1"]


def test_every_way_says_the_same(arguments, capsys):
    assert reuse.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "96 + 8 tokens, batch 2, to the first token"
    ways = [line for line in lines[2:] if line.endswith("same")]
    assert len(ways) == len(lines) - 2 == 6


def test_a_bar_that_is_missed_is_told(arguments):
    assert reuse.main([*arguments, "--bar", "1e9"]) == 1
