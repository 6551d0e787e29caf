"""Tokens as pictures show them: nothing hidden, nothing interpreted, nothing lost."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.records import TokenTexts, TraceHeader
from descant.trace.trace import Trace
from descant.trace.trace_data import text_pieces, token_pieces

ANY = st.text(st.characters(codec=None, categories=None), max_size=30)  # surrogates too


def trace(texts: dict[int, str], special: tuple[int, ...] = ()) -> Trace:
    return Trace([TraceHeader("0", "Tiny", 100, 8, 1000), TokenTexts(texts, special)])


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb\tc", [("a", False), ("↵", True), ("b", False), ("⇥", True), ("c", False)]),
        ("\r\n", [("‹U+000D›↵", True)]),
        ("\x1b[31m", [("‹U+001B›", True), ("[31m", False)]),
        ("\x9b2J\x00\x7f", [("‹U+009B›", True), ("2J", False), ("‹U+0000›‹U+007F›", True)]),
        ("\udce4\udcff", [("‹E4›‹FF›", True)]),
        ("\ud83d", [("‹U+D83D›", True)]),
        ("a\u202eb\u2066", [("a", False), ("‹U+202E›", True), ("b", False), ("‹U+2066›", True)]),
        ("\u200b\u200e\ufeff\u00ad", [("‹U+200B›‹U+200E›‹U+FEFF›‹U+00AD›", True)]),
        ("\u2028\u2029\u00a0\u3000", [("‹U+2028›‹U+2029›‹U+00A0›‹U+3000›", True)]),
        ("\ue000\uffff\U000e0041\U000e0101", [("‹U+E000›‹U+FFFF›‹U+E0041›‹U+E0101›", True)]),
        ("\u3164\u2800\u034f", [("‹U+3164›‹U+2800›‹U+034F›", True)]),
        ("<script>&\"'", [("<script>&\"'", False)]),
        ("e\u0301", [("e\u0301", False)]),
        ("\u0301", [("◌\u0301", True)]),
        ("e" + "\u0301" * 5, [("e" + "\u0301" * 3, False), ("‹U+0301›‹U+0301›", True)]),
        ("👩\u200d🚀", [("👩\u200d🚀", False)]),
        ("❤\ufe0f\u200d🔥", [("❤\ufe0f\u200d🔥", False)]),
        ("👩🏽\u200d🚀", [("👩🏽\u200d🚀", False)]),
        ("👩\u200d", [("👩", False), ("‹U+200D›", True)]),
        ("a\u200db", [("a", False), ("‹U+200D›", True), ("b", False)]),
        ("a\ufe0f", [("a", False), ("‹U+FE0F›", True)]),
        ("שלום 中文 ß", [("שלום 中文 ß", False)]),
        ("", []),
    ],
)
def test_each_kind_of_character(text: str, seen: list[tuple[str, bool]]) -> None:
    assert escape_invisible(text) == seen


def test_visible_spaces() -> None:
    assert escape_invisible("  a b ") == [("  a b ", False)]
    assert escape_invisible("  a b ", mark_spaces=True) == [("··", True), ("a b ", False)]
    assert escape_invisible(" ", mark_spaces=True) == [("·", True)]


@given(ANY, st.booleans())
def test_nothing_hidden_is_left_and_nothing_seen_is_lost(text: str, spaces: bool) -> None:
    pieces = escape_invisible(text, spaces)
    joiners = "\u200d\ufe0f"  # only inside emoji
    for one in join_pieces(pieces):
        assert one == " " or one in joiners or unicodedata.category(one)[0] not in "CZ"
    join_pieces(pieces).encode("utf-8")
    kept = "".join(one for one, stands in pieces if not stands)
    assert set(kept) <= set(text)
    for one in kept:
        assert one not in "\n\t\u202e\u200b"
    assert all(one for one, _ in pieces)
    assert all(before[1] != after[1] for before, after in itertools.pairwise(pieces))


def test_a_token_without_a_text_is_its_number() -> None:
    there = trace({1: "x", 2: ""})
    assert token_pieces(there, 1) == [("x", False)]
    assert token_pieces(there, 2) == [("‹2›", True)]
    assert token_pieces(there, 3) == [("‹3›", True)]


def test_a_special_token_is_its_name_and_differs_from_the_same_text() -> None:
    there = trace({1: "<|end|>", 2: "<|end|>", 3: "<\u202e>"}, special=(1, 3))
    assert token_pieces(there, 1) == [("<|end|>", True)]
    assert token_pieces(there, 2) == [("<|end|>", False)]
    assert token_pieces(there, 3) == [("<‹U+202E›>", True)]


def test_tokens_that_share_a_character_make_it_whole() -> None:
    halves = "ä".encode()
    there = trace({1: " d", 2: halves[:1].decode("utf-8", "surrogateescape"), 3: "\udca4", 4: "<s>"}, (4,))
    assert token_pieces(there, 2) == [("‹C3›", True)]
    assert text_pieces(there, [1, 2, 3]) == [(" dä", False)]
    assert text_pieces(there, [1, 2, 3], mark_spaces=True) == [("·", True), ("dä", False)]
    assert text_pieces(there, [1, 2, 4, 3, 9]) == [
        (" d", False),
        ("‹C3›", True),
        ("<s>", True),
        ("‹A4›", True),
        ("‹9›", True),
    ]
    assert text_pieces(there, []) == []


def test_a_surrogate_that_is_no_byte_does_not_break_a_phrase() -> None:
    assert text_pieces(trace({1: "a\ud800", 2: "b"}), [1, 2]) == [
        ("a", False),
        ("‹U+D800›", True),
        ("b", False),
    ]
