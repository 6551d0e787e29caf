"""Text of a model on a terminal: control sequences are spelled out, whichever way they are split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.tokenization.display import RunningText, is_hidden

HOSTILE = {
    "\x1b]52;c;ZXZpbA==\x07": "‹U+001B›]52;c;ZXZpbA==‹U+0007›",
    "\x1b[2J\x1b[H": "‹U+001B›[2J‹U+001B›[H",
    "\x9b31m": "‹U+009B›31m",
    "a\rb\bc\x7f\x00": "a‹U+000D›b‹U+0008›c‹U+007F›‹U+0000›",
    "\u202eevil\u202c\u2066x\u2069": "‹U+202E›evil‹U+202C›‹U+2066›x‹U+2069›",
    "\u2028\ufeff\U000e0041": "‹U+2028›‹U+FEFF›‹U+E0041›",
}
HARMLESS = [
    "plain text\n\twith lines",
    "Été, naïve, 日本語\u3000と", "👩‍👩‍👧 ✈️", "می\u200cخواهم", "e\u0301", "x\u00a0y",
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert RunningText().escape(text) == shown
    running = RunningText()
    assert "".join(running.escape(char) for char in text) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_text_stays(text: str) -> None:
    assert RunningText().escape(text) == text
    running = RunningText()
    assert "".join(running.escape(char) for char in text) == text


@given(st.lists(st.text(max_size=6), max_size=6))
def test_pieces_are_shown_as_the_whole(pieces: list[str]) -> None:
    running = RunningText()
    shown = "".join(running.escape(piece) for piece in pieces)
    assert not any(is_hidden(char) for char in shown if char not in "\n\t\u200c\u200d\ufe0f\u3000\u00a0"
                   and not "\u2000" <= char <= "\u205f" and char != "\u1680")  # fmt: skip
    assert len(shown) >= len("".join(pieces))


def test_a_line_of_json_keeps_its_value() -> None:
    from descant.cli.terminal import escape_json

    for text in (*HOSTILE, *HARMLESS):
        line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
        shown = escape_json(line)
        assert json.loads(shown) == {"text": text}
        assert not any(is_hidden(char) for char in shown.removesuffix("\n"))
