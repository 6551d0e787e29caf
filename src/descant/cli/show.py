"""`descant show` and `descant tree`: draw a trace on the terminal or to a file."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from descant.cli import terminal
from descant.cli.command import Command, write_file
from descant.cli.options import STDIO, argument, option
from descant.errors import InputError, TraceError
from descant.trace.records import read_records
from descant.trace.trace import Trace
from descant.trace.trace_data import PICTURES


@dataclass(frozen=True, kw_only=True)
class ShowTraceCommand(Command):
    """Show a trace: the text with the probability of every token, and further pictures.

    With a second trace it shows both side by side.
    """

    file: str = argument("FILE", "A trace of `generate --trace`; - is standard input.")
    other: str | None = argument("OTHER", "Another trace, to be shown beside the first.", None)
    picture: str | None = option(
        "What to show (default: text, and of two traces beside).", metavar=f"[{'|'.join(PICTURES)}]"
    )
    html: str | None = option("Write all pictures as one page there; - is standard output.", metavar="FILE")
    svg: str | None = option("Write the picture as SVG there; - is standard output.", metavar="FILE")
    request: int | None = option("Which request of it (default: the first).", metavar="N")
    sequence: int | None = option("Which of its sequences (default: 0, the best).", metavar="N")
    step: int | None = option("As it was after this step (default: the last).", metavar="N")

    def run(self) -> int:
        """Draw the picture."""
        self._check_options()
        trace = load_trace(self.file)
        beside = None if self.other is None else load_trace(self.other)
        if self.html is not None:
            write_output(trace.html(beside), self.html, "html")
            return 0
        picture = self.picture or ("text" if beside is None else "beside")
        where = {"request": self.request, "sequence": self.sequence or 0, "step": self.step}
        draw(trace, picture, self.svg, beside=beside, **where)
        return 0

    def _check_options(self) -> None:
        """Raise InputError for contradicting options."""
        if self.file == self.other == STDIO:
            raise InputError("OTHER", "must not be standard input, which FILE is", self.other)
        if self.html is not None:
            for name in ("svg", "picture", "request", "sequence", "step"):
                if getattr(self, name) is not None:
                    advice = "leave one of them out"
                    raise InputError(
                        name, "has no use with --html, which shows all", getattr(self, name), advice
                    )
        if self.other is not None and self.picture not in (None, "beside"):
            raise InputError("picture", "must be beside where there are two traces", self.picture)
        for name in ("html", "svg"):
            for source in (self.file, self.other):
                reject_overwrite(getattr(self, name), source, name)


def load_trace(path: str) -> Trace:
    """Load a trace from a file or standard input."""
    try:
        return Trace(read_records(sys.stdin)) if path == STDIO else Trace.load(path)
    except UnicodeDecodeError:
        raise TraceError(f"{path} must be a trace: JSON lines in ASCII") from None
    except TraceError as error:
        message = str(error)
        raise TraceError(message if message.startswith(path) else f"{path}: {message}") from None


def draw(trace: Trace, picture: str, svg: str | None, **selection: Any) -> None:
    """Write a picture to a file, or as text in the width of standard output, in colours if it has them."""
    if svg is not None:
        write_output(trace.svg(picture, **selection), svg, "svg")
        return
    from rich.console import Console  # slow to import

    console = Console(highlight=False, markup=False)
    colour = console.color_system not in (None, "windows") and not console.no_color
    terminal.write(trace.text(picture, width=console.width, colour=colour, **selection) + "\n")


def write_output(text: str, path: str, name: str) -> None:
    """Write a picture to a file or to standard output."""
    if path == STDIO:
        terminal.write(text)
    else:
        write_file(name, path, text)


def reject_overwrite(target: str | None, source: str | None, name: str) -> None:
    """Raise InputError if a picture would overwrite its trace."""
    if target in (None, STDIO) or source in (None, STDIO):
        return
    with suppress(OSError):
        if Path(str(target)).samefile(str(source)):
            raise InputError(name, "must be another file than the trace", target)


@dataclass(frozen=True, kw_only=True)
class TreeCommand(Command):
    """Show the tree of a trace: all hypotheses with scores, dropped and returned ones."""

    file: str = argument("FILE", "A trace of `generate --trace`; - is standard input.")
    svg: str | None = option("Write the picture as SVG there; - is standard output.", metavar="FILE")
    request: int | None = option("Which request of it (default: the first).", metavar="N")
    step: int | None = option("As it was after this step (default: the last).", metavar="N")

    def run(self) -> int:
        """Draw the tree."""
        reject_overwrite(self.svg, self.file, "svg")
        draw(load_trace(self.file), "tree", self.svg, request=self.request, step=self.step)
        return 0
