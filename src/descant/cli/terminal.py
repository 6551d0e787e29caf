"""Terminal output: results on standard output, messages on standard error."""

from __future__ import annotations

import os
import sys
from unicodedata import category

from rich.console import Console
from rich.text import Text

__all__ = ["console", "escape_control", "mute_stdout", "print_error", "print_info", "print_warning", "write"]


def console() -> Console:
    """A rich console on standard error; plain if it is not a terminal or NO_COLOR is set."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Write text to standard output, unbuffered."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_info(message: object) -> None:
    """Print a message, dim."""
    console().print(Text(str(message), style="dim"))


def escape_control(text: str) -> str:
    """An untrusted text with control, invisible and reordering characters escaped."""
    return "".join(
        char if char.isprintable() or category(char) == "Zs" else repr(char)[1:-1] for char in text
    )


def print_error(message: object) -> None:
    """Print an error as one red line."""
    console().print(Text(f"error: {_one_line(message)}", style="red"))


def print_warning(message: object) -> None:
    """Print a warning as one yellow line."""
    console().print(Text(f"warning: {_one_line(message)}", style="yellow"))


def _one_line(message: object) -> str:
    return escape_control(" ".join(str(message).split()))


def mute_stdout() -> None:
    """Redirect standard output to the null device, after its reader has closed the pipe."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    except (OSError, ValueError):  # standard output is not a system file: nothing to redirect
        return
