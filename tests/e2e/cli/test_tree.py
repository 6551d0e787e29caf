"""`descant tree`: the tree of a trace on the terminal and as SVG."""

from __future__ import annotations

import pytest

from descant.trace.trace import Trace
from tests.unit.trace import fakes


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a trace in it."""
    monkeypatch.chdir(tmp_path)
    fakes.beams(returned=2).save("run.jsonl")
    return tmp_path


def test_it_is_the_tree_of_the_trace(descant):
    result = descant("tree", "run.jsonl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == Trace.load("run.jsonl").text("tree", width=80) + "\n"
    assert "1st, " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere must be a file that can be read"),
        (("run.jsonl", "--request", 3), "--request must be one of [0], got 3"),
        (("run.jsonl", "--svg", "run.jsonl"), "--svg must be another file than the trace"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(descant, arguments, message):
    result = descant("tree", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
