"""A conversation that ends by an error or a signal is saved, and the file is named."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from descant.cli import terminal
from descant.cli.chat.conversation import Conversation
from descant.cli.chat.state_files import rescue_file
from descant.cli.chat.transcript import save_transcript
from descant.errors import DescantError

__all__ = ["rescued"]


@contextlib.contextmanager
def rescued(conversation: Conversation) -> Iterator[None]:
    """Save the conversation of a user if the block raises, or if a signal ends the process."""
    if not conversation.is_interactive:
        yield
        return
    previous = {number: signal.signal(number, _leave) for number in _signals()}
    try:
        yield
    except BaseException:
        if conversation.messages:
            _save(conversation)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signals() -> list[signal.Signals]:
    """Signals that end a process: of `kill`, and of a terminal that closes."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _leave(number: int, _: Any) -> None:
    sys.exit(128 + number)  # as shells do


def _save(conversation: Conversation) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        try:
            path = rescue_file()
            save_transcript(conversation, path)
        except (OSError, DescantError) as error:
            terminal.print_error(f"the conversation cannot be saved: {error}")
        else:
            terminal.print_info(f"the conversation is saved: /load {path}")
