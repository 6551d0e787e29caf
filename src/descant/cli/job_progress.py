"""The progress of a job: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import time
from typing import Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from descant.cli import terminal
from descant.jobs import JobProgress

__all__ = ["JobProgressDisplay", "format_seconds"]

_SECONDS_BETWEEN_LINES: Final = 10.0


class JobProgressDisplay:
    """Shows rows, tokens a second and the time left on standard error."""

    def __init__(self) -> None:
        console = terminal.console()
        self._is_terminal = console.is_terminal
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, disable=not self._is_terminal)
        self._task = self._bar.add_task("starting", total=None)
        self._next_line: float | None = None  # from the first row on: a model may take long to load
        self.rows: int | None = None  # of the source; None: it is not read yet

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: JobProgress) -> None:
        """Show the state at the start or after a row."""
        if self.rows is None and progress.damaged_files:
            names = ", ".join(progress.damaged_files)
            terminal.print_warning(f"shards that were changed are computed again: {names}")
        self.rows = progress.rows
        if self._is_terminal:
            text = _pace(progress)
            self._bar.update(self._task, total=progress.rows, completed=progress.finished, description=text)
        elif progress.computed and (self._next_line is None or time.monotonic() >= self._next_line):
            is_first, self._next_line = self._next_line is None, time.monotonic() + _SECONDS_BETWEEN_LINES
            if is_first:
                return
            terminal.print_info(f"{progress.finished} of {progress.rows} rows, {_pace(progress)}")


def _pace(progress: JobProgress) -> str:
    if not progress.computed:
        return "the first rows are running" if progress.finished < progress.rows else ""
    left = progress.seconds_left
    time_left = "" if left is None else f", {format_seconds(left)} left"
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.tokens_per_second:.0f} tokens a second{failed}{time_left}"


def format_seconds(seconds: float) -> str:
    """A time in hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
