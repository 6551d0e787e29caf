"""The log of a group's attempts: which rows were running when a worker ended before its time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["AttemptLog", "EarlierAttempts"]

FOLDER: Final = ".attempts"
MAX_TRIES: Final = 2  # of a row alone


@dataclass
class EarlierAttempts:
    """What the attempts of workers that ended say about the rows of a group."""

    suspects: set[int] = field(default_factory=set)  # rows that were running when a worker ended
    tries: dict[int, int] = field(default_factory=dict)  # of rows that ran alone when a worker ended
    unexplained: int = 0  # ends while no row was running, as when prompts are read or a shard is written

    def has_failed(self, row: int) -> bool:
        """Whether a row is not tried again."""
        return self.tries.get(row, 0) >= MAX_TRIES

    def is_suspect(self, row: int) -> bool:
        """Whether a row runs alone; after unexplained ends every row does."""
        return row in self.suspects or self.unexplained >= MAX_TRIES


class AttemptLog:
    """A file of a group to which a worker adds a line before and after each row.

    The file outlives the worker. Only attempts of the same run count: a run that was killed says nothing
    about its rows. The lines are not flushed to the disk, since they need not survive the machine. Without a
    run nothing is written.
    """

    def __init__(self, sink: Path, group: int, run: str | None) -> None:
        self._path = sink / FOLDER / f"group-{group:05}.log"
        self._run = run
        self._file: int | None = None

    def open(self) -> EarlierAttempts:
        """Begin an attempt; returns what is known from earlier ones."""
        if self._run is None:
            return EarlierAttempts()
        self._path.parent.mkdir(exist_ok=True)
        try:
            lines = self._path.read_text("ascii").splitlines()
        except (FileNotFoundError, UnicodeDecodeError):
            lines = []
        is_same_run = bool(lines) and lines[0] == self._run
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if is_same_run else os.O_TRUNC | os.O_APPEND)
        self._file = os.open(self._path, flags, 0o666)
        os.write(self._file, b"\n=\n" if is_same_run else f"{self._run}\n=\n".encode())
        return _read_attempts(lines[1:]) if is_same_run else EarlierAttempts()

    def begin(self, row: int, *, alone: bool = False) -> None:
        """Note that a row starts."""
        self._add(f"!{row}\n" if alone else f"+{row}\n")

    def end(self, row: int) -> None:
        """Note that a row has ended."""
        self._add(f"-{row}\n")

    def close(self, *, is_complete: bool) -> None:
        """End the attempt; the log of a complete group is removed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if is_complete and self._run is not None:
            self._path.unlink(missing_ok=True)

    def _add(self, line: str) -> None:
        if self._file is not None:
            os.write(self._file, line.encode())


def _read_attempts(lines: list[str]) -> EarlierAttempts:
    """The rows that were running at the end of each attempt; all attempts in a log have ended."""
    found = EarlierAttempts()
    running: dict[int, bool] = {}  # whether a row ran alone
    is_first = True
    for line in [*lines, "="]:
        if line == "=":
            if not is_first:
                _end_attempt(found, running)
            is_first, running = False, {}
        elif line[:1] in ("+", "!", "-") and line[1:].isdecimal():  # a torn line counts for nothing
            row = int(line[1:])
            if line[0] == "-":
                running.pop(row, None)
            else:
                running[row] = line[0] == "!"
    return found


def _end_attempt(found: EarlierAttempts, running: dict[int, bool]) -> None:
    found.unexplained += not running
    for row, alone in running.items():
        found.suspects.add(row)
        if alone:
            found.tries[row] = found.tries.get(row, 0) + 1
