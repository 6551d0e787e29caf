"""Terminal output and exit codes: results on standard output, messages on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final
from unicodedata import category

from descant.tokenization.display import RunningText, is_hidden

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """A rich console on standard error; plain if it is not a terminal or NO_COLOR is set."""
    from rich.console import Console  # slow to import

    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Write text to standard output, unbuffered; it may style a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()


class UntrustedText:
    """Text of a model in pieces for standard output: escaped on a terminal, unchanged in a pipe or file."""

    def __init__(self) -> None:
        self._text = RunningText() if sys.stdout.isatty() else None

    def write(self, text: str) -> None:
        """Write the next piece."""
        write(text if self._text is None else self._text.escape(text))


def write_untrusted(text: str) -> None:
    """Write lines that quote a model, a file or its name to standard output."""
    UntrustedText().write(text)


def print_info(message: object) -> None:
    """Print a message of one or more lines, dim."""
    print_lines(message, "dim")


def print_lines(message: object, style: str = "") -> None:
    """Print lines that may quote untrusted text to standard error."""
    _print_styled(RunningText().escape(str(message)), style)


def escape_json(line: str) -> str:
    """A line of JSON with hidden characters as its own escapes; the line end stays."""
    return "".join(json.dumps(char)[1:-1] if char != "\n" and is_hidden(char) else char for char in line)


def escape_control(text: str) -> str:
    """An untrusted text as part of a line, with control, invisible and reordering characters escaped."""
    return "".join(
        char if char.isprintable() or category(char) == "Zs" else repr(char)[1:-1] for char in text
    )


def print_error(message: object) -> None:
    """Print an error as one red line."""
    _print_styled(f"error: {_one_line(message)}", "red")


def print_warning(message: object) -> None:
    """Print a warning as one yellow line."""
    _print_styled(f"warning: {_one_line(message)}", "yellow")


def _print_styled(text: str, style: str) -> None:
    """Print text to standard error."""
    from rich.text import Text

    console().print(Text(text, style=style))


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


FAILURE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # as of shells for the signal
BROKEN_PIPE: Final = 141
