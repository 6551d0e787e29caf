"""The lines of a conversation: typed at a terminal, or read from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from descant.cli import terminal
from descant.cli.chat.state_files import history_file
from descant.errors import MissingExtra

__all__ = ["input_lines", "is_interactive"]


def is_interactive() -> bool:
    """Whether a user types: standard input is a terminal, and a prompt can be shown."""
    return sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())


def input_lines(*, keeps_history: bool) -> Iterator[str]:
    """Turns that a user types, or lines of a pipe."""
    if not is_interactive():
        for line in sys.stdin:  # noqa: UP028 - delegating would close standard input with the iterator
            yield line
        return
    try:
        from descant.cli.chat.prompt_session import build_session
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prompt_toolkit":
            raise
        raise MissingExtra("cli", "the prompt of `descant chat`") from error
    path = history_file() if keeps_history else None
    if keeps_history and path is None:
        terminal.print_warning("the history file cannot be written: this run keeps its lines to itself")
    session = build_session(path)
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:  # between two prompts, where nothing is typed yet
            continue
        except EOFError:
            return
