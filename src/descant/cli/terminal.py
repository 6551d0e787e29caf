"""What goes to the terminal: text on standard output, everything about it on standard error."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.text import Text

__all__ = ["blame", "console", "note", "silence", "warn", "write"]


def console() -> Console:
    """Standard error, as rich writes it; plain where it is no terminal or NO_COLOR is set."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(message: object) -> None:
    """Something to know that is not the result, dim."""
    console().print(Text(str(message), style="dim"))


def blame(message: object) -> None:
    """An error, as one line in red."""
    console().print(Text(f"error: {' '.join(str(message).split())}", style="red"))


def warn(message: object) -> None:
    """Something that may go wrong, as one line in yellow."""
    console().print(Text(f"warning: {' '.join(str(message).split())}", style="yellow"))


def silence() -> None:
    """Let what is still buffered for a reader that has gone away go nowhere."""
    try:
        hole = os.open(os.devnull, os.O_WRONLY)
        os.dup2(hole, sys.stdout.fileno())
        os.close(hole)
    except (OSError, ValueError):  # standard output is no file of the system: nothing to redirect
        return
