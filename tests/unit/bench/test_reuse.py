"""The benchmark of prompt reuse runs, gets the same tokens from every call, and reports a missed limit."""

from __future__ import annotations

import pytest

from bench import reuse


@pytest.fixture
def arguments(tiny):
    return ["--model", str(tiny("llama").folder), "--prefix", "96", "--batch", "2", "--repeats", "1"]


def test_every_call_gives_the_same_tokens(arguments, capsys):
    assert reuse.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "96 + 8 tokens, batch 2, to the first token"
    calls = [line for line in lines[2:] if line.endswith("same")]
    assert len(calls) == len(lines) - 2 == 6


def test_a_missed_limit_fails(arguments):
    assert reuse.main([*arguments, "--bar", "1e9"]) == 1
