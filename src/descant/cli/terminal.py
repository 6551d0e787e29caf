"""What goes to the terminal: text on standard output, everything about it on standard error."""

from __future__ import annotations

import os
import sys
from unicodedata import category

from rich.console import Console
from rich.text import Text

__all__ = ["console", "escape_control", "mute_stdout", "print_error", "print_info", "print_warning", "write"]


def console() -> Console:
    """Standard error, as rich writes it; plain where it is no terminal or NO_COLOR is set."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_info(message: object) -> None:
    """Something to know that is not the result, dim."""
    console().print(Text(str(message), style="dim"))


def escape_control(text: str) -> str:
    """Somebody else's text in one line, with what a terminal obeys, hides or turns around spelt out."""
    return "".join(one if one.isprintable() or category(one) == "Zs" else repr(one)[1:-1] for one in text)


def print_error(message: object) -> None:
    """An error, as one line in red."""
    console().print(Text(f"error: {_one_line(message)}", style="red"))


def print_warning(message: object) -> None:
    """Something that may go wrong, as one line in yellow."""
    console().print(Text(f"warning: {_one_line(message)}", style="yellow"))


def _one_line(message: object) -> str:
    return escape_control(" ".join(str(message).split()))


def mute_stdout() -> None:
    """Let what is still buffered for a reader that has gone away go nowhere."""
    try:
        hole = os.open(os.devnull, os.O_WRONLY)
        os.dup2(hole, sys.stdout.fileno())
        os.close(hole)
    except (OSError, ValueError):  # standard output is no file of the system: nothing to redirect
        return
