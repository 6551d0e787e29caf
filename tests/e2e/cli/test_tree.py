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


def test_a_step_of_it(descant):
    assert (
        descant("tree", "run.jsonl", "--step", 1).stdout
        == Trace.load("run.jsonl").text("tree", step=1) + "\n"
    )


def test_as_a_file(descant, here):
    result = descant("tree", "run.jsonl", "--svg", "tree.svg")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (here / "tree.svg").read_text(encoding="utf-8") == Trace.load("run.jsonl").svg("tree")
    assert descant("tree", "run.jsonl", "--svg", "-").stdout == Trace.load("run.jsonl").svg("tree")


def test_bold_on_a_terminal(descant):
    env = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    assert (
        descant("tree", "run.jsonl", env=env).stdout
        == Trace.load("run.jsonl").text("tree", colour=True) + "\n"
    )


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
