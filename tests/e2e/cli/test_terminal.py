"""What a model, a file or its name says is text on a terminal, and bytes in a pipe."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from descant.api.stream import StreamEvent
from descant.cli import terminal
from descant.cli.jsonl import JsonlStream
from descant.cli.output import StreamPrinter
from descant.tokenization.display import is_hidden

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b1m\u202eé\r"


class Screen(io.StringIO):
    """A terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def screen(request, monkeypatch):
    screen = Screen(request.param)
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stdout=screen))
    return screen


def check(screen):
    """Spelled out on a terminal, unchanged in a pipe."""
    text = screen.getvalue()
    if screen.terminal:
        assert not any(is_hidden(char) for char in text if char != "\n")
        assert "‹U+001B›" in text or "\\u001b" in text
    else:
        assert HOSTILE in text or HOSTILE in json.loads(text)["text"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream(screen, size):
    printer = StreamPrinter()
    for start in range(0, len(HOSTILE), size):
        printer.print_event(StreamEvent(0, 0, (), HOSTILE[start : start + size]))
    printer.end_line()
    check(screen)


def test_several_sequences(screen):
    printer = StreamPrinter()
    for sequence in range(2):
        printer.print_event(StreamEvent(0, sequence, (), HOSTILE, finish_reason="stop"))
    check(screen)


def test_rows(screen):
    JsonlStream(screen).write({"text": HOSTILE})
    check(screen)
    assert json.loads(screen.getvalue()) == {"text": HOSTILE}


def test_lines_that_quote(screen):
    terminal.write_untrusted(f"key {HOSTILE}\n")
    check(screen)


@pytest.mark.parametrize("say", [terminal.print_info, terminal.print_error, terminal.print_warning])
def test_messages(say, capsys):
    say(f"a file named {HOSTILE}")
    text = capsys.readouterr().err
    assert not any(is_hidden(char) for char in text if char != "\n")
    assert "52;c;" in text


def test_a_traceback(descant, tmp_path):
    result = descant("show", f"{tmp_path}/{HOSTILE}", "--debug")
    assert result.exit_code == 2
    assert not any(is_hidden(char) for char in result.stderr if char != "\n")
