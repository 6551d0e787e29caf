"""`descant show`: the pictures of a trace on the terminal and as files, and what it refuses."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from descant.trace.trace import Trace
from tests.unit.trace import fakes


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with two traces in it."""
    monkeypatch.chdir(tmp_path)
    fakes.beams().save("beams.jsonl")
    fakes.guesses().save("guesses.jsonl")
    return tmp_path


@pytest.mark.parametrize("picture", ["tree", "text", "processors", "speculation"])
def test_it_shows_what_the_trace_draws(descant, picture):
    result = descant("show", "guesses.jsonl", "--picture", picture)
    assert result.exit_code == 0
    assert result.stdout == Trace.load("guesses.jsonl").text(picture, width=80) + "\n"


def test_two_traces_are_side_by_side(descant):
    one, other = Trace.load("beams.jsonl"), Trace.load("guesses.jsonl")
    shown = descant("show", "beams.jsonl", "guesses.jsonl").stdout
    assert shown == one.text("beside", beside=other, width=80) + "\n"


def test_where(descant):
    trace = Trace.load("beams.jsonl")
    shown = descant("show", "beams.jsonl", "--picture", "tree", "--step", 2, "--request", 0).stdout
    assert shown == trace.text("tree", step=2) + "\n"
    assert shown != trace.text("tree") + "\n"


def test_a_page(descant, here):
    result = descant("show", "beams.jsonl", "--html", "page.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (here / "page.html").read_text(encoding="utf-8") == Trace.load("beams.jsonl").html()
    assert descant("show", "beams.jsonl", "--html", "-").stdout == Trace.load("beams.jsonl").html()


def test_an_svg(descant, here):
    result = descant("show", "guesses.jsonl", "--picture", "speculation", "--svg", "out.svg")
    assert (result.exit_code, result.stdout) == (0, "")
    said = (here / "out.svg").read_text(encoding="utf-8")
    assert said == Trace.load("guesses.jsonl").svg("speculation")
    ElementTree.fromstring(said)


def test_standard_input(descant, here):
    given = (here / "beams.jsonl").read_text(encoding="ascii")
    assert descant("show", "-", input=given).stdout == descant("show", "beams.jsonl").stdout


def test_colours_only_where_they_are_wanted(descant):
    assert "\x1b" not in descant("show", "beams.jsonl").stdout
    forced = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert "\x1b[" in descant("show", "beams.jsonl", env=forced).stdout
    assert "\x1b[" not in descant("show", "beams.jsonl", env=forced | {"NO_COLOR": "1"}).stdout


def test_as_wide_as_the_terminal(descant):
    lines = descant("show", "beams.jsonl", env={"COLUMNS": "40"}).stdout.splitlines()
    assert max(map(len, lines)) <= 40
    assert max(map(len, descant("show", "beams.jsonl").stdout.splitlines())) > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl must be a file that can be read"),
        (("prose.txt",), "prose.txt: line 1 must be a record"),
        (("beams.jsonl", "prose.txt"), "prose.txt: line 1 must be a record"),
        (("empty.txt",), "empty.txt: a trace must begin with its header, got an empty file"),
        (("latin.txt",), "latin.txt must be a trace: JSON lines in ASCII"),
        (("beams.jsonl", "--picture", "portrait"), "--picture must be one of tree, text, processors"),
        (("beams.jsonl", "--picture", "beside"), "`beside` must be a trace"),
        (("beams.jsonl", "guesses.jsonl", "--picture", "tree"), "--picture must be beside"),
        (("beams.jsonl", "--request", 7), "--request must be one of [0], got 7"),
        (("beams.jsonl", "--sequence", 1), "--sequence must be from 0 to 0, got 1"),
        (("beams.jsonl", "--step", 99), "--step must be a step of request 0"),
        (("beams.jsonl", "--html", "a", "--svg", "b"), "--svg has no use with --html"),
        (("beams.jsonl", "--html", "a", "--sequence", 0), "--sequence has no use with --html"),
        (("beams.jsonl", "--html", "beams.jsonl"), "--html must be another file than the trace"),
        (("beams.jsonl", "--svg", "beams.jsonl"), "--svg must be another file than the trace"),
        (("beams.jsonl", "--svg", "no/such/folder"), "--svg must be a file that can be written"),
        (("-", "-"), "OTHER must not be standard input"),
        ((), "Missing argument 'FILE'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(descant, here, arguments, message):
    (here / "prose.txt").write_text("Once upon a time\n")
    (here / "empty.txt").write_text("")
    (here / "latin.txt").write_bytes(b"\xe4")
    before = (here / "beams.jsonl").read_bytes()
    result = descant("show", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert (here / "beams.jsonl").read_bytes() == before
