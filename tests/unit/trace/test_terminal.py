"""Pictures for a terminal: never too wide, no control sequences, and the numbers of the trace."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import InputError
from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.cells import cell_width, clip_pieces, fit_text, split_lines, wrap_pieces
from descant.trace.pictures.terminal import horizontal_bar
from descant.trace.trace import Trace
from tests.unit.trace import fakes
from tests.unit.trace.test_svg import all_hostile

ONE = ("tree", "text", "processors", "speculation")
ANY = st.text(st.characters(codec=None, categories=None), min_size=1, max_size=12)
CODES = re.compile(r"\x1b\[[0-9;]*m")


def pictures(one: Trace, other: Trace, width: int, colour: bool) -> list[str]:
    found = [trace.text(name, width=width, colour=colour) for name in ONE for trace in (one, other)]
    return [*found, one.text("beside", beside=other, width=width, colour=colour)]


@settings(max_examples=25, deadline=None)
@given(ANY, st.integers(1, 120), st.booleans())
def test_no_line_is_too_wide_and_no_control_sequence_is_printed(text, width, colour):
    for said in pictures(*all_hostile(text), width, colour):
        bare = CODES.sub("", said) if colour else said
        for line in bare.split("\n"):
            assert cell_width(line) <= width
        for letter in bare:
            assert letter in "\n\u200d\ufe0f" or letter.isprintable(), hex(ord(letter))


def test_codes_only_with_colour_and_all_of_them_end():
    one, other = fakes.beams(6, 5, groups=3, returned=3), fakes.guesses()
    assert not any("\x1b" in said for said in pictures(one, other, 80, False))
    for said in pictures(one, other, 80, True):
        for line in said.splitlines():
            codes = CODES.findall(line)
            assert codes[1::2] == ["\x1b[0m"] * (len(codes) // 2)
            assert "\x1b[0m" not in codes[::2]


def test_the_tree_has_every_branch_with_its_score():
    trace = fakes.beams(4, 6, seed=8, returned=2)
    said = trace.text("tree", width=100)
    lines = said.splitlines()
    for node in trace.tree.nodes.values():
        if not node.children:
            assert any(f"−{abs(node.score):.2f}" in line for line in lines)
    assert sum("dropped" in line for line in lines) == sum(
        not node.children and node.state == "dropped" for node in trace.tree.nodes.values()
    )
    [best] = [line for line in lines if "1st, " in line]
    assert best.startswith("┗")
    assert "\x1b[1;" in next(line for line in trace.text("tree", colour=True).splitlines() if "1st, " in line)


def test_every_token_is_marked_by_its_probability():
    trace = fakes.guesses(6)
    rows = trace.text("text").splitlines()
    marks = [line for line in rows if line.startswith("p ")]
    assert marks
    assert set("".join(marks)) <= set("p ░▒▓█")
    assert any(line.startswith("H ") for line in rows)
    assert "\x1b[38;5;16;48;5;" in trace.text("text", colour=True)
    assert not any(line.startswith("p ") for line in trace.text("text", colour=True).splitlines())


def test_drafts_are_counted_by_position():
    trace = fakes.guesses(seed=4)
    said = trace.text("speculation")
    rows = [row for step in trace.steps for row in step.rows]
    first = sum(bool(row.drafts) for row in rows), sum(len(row.runs[0].tokens) > 1 for row in rows)
    assert f"{first[1]} of {first[0]}" in said
    assert "✗" in said
    assert "━" in said


def test_processors_are_named_with_what_they_cut():
    said = fakes.guesses().text("processors")
    assert "TopKWarper" in said
    assert "cut with" in said
    assert "all together" in said


def test_an_unknown_picture():
    with pytest.raises(InputError, match="`picture` must be one of"):
        fakes.beams().text("portrait")


@pytest.mark.parametrize(
    ("text", "size"),
    [("abc", 3), ("中文", 4), ("e\u0301", 1), ("👩\u200d🚀", 4), ("❤\ufe0f", 2), ("", 0), ("ﾊ", 1)],
)
def test_cells(text, size):
    assert cell_width(text) == size


@given(ANY, st.integers(0, 20))
def test_texts_are_cut_to_cells(text, width):
    pieces = escape_invisible(text)
    assert cell_width(join_pieces(clip_pieces(pieces, width))) <= width
    assert cell_width(fit_text(join_pieces(pieces), width)) == width
    for lines in (split_lines(pieces, width), wrap_pieces(pieces, max(width, 2))):
        assert all(cell_width(join_pieces(line)) <= max(width, 2) for line in lines)
    assert "".join(join_pieces(line) for line in split_lines(pieces, width)) == join_pieces(pieces)


@given(st.floats(0, 1), st.integers(0, 30))
def test_bars(value, width):
    assert cell_width(horizontal_bar(value, width)) == width
    assert horizontal_bar(1.0, width) == "█" * width
    assert horizontal_bar(0.0, width) == " " * width
    if width and value:
        assert horizontal_bar(value, width).strip()
