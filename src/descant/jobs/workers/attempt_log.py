"""The log of a group's attempts: which rows were running when a worker ended before its time."""

from __future__ import annotations

import os
import re
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
            run, *attempts = self._path.read_text("ascii").split("\n=\n")
        except (FileNotFoundError, UnicodeDecodeError):
            run, attempts = "", []
        is_same_run = run == self._run
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if is_same_run else os.O_TRUNC | os.O_APPEND)
        self._file = os.open(self._path, flags, 0o666)
        os.write(self._file, b"\n=\n" if is_same_run else f"{self._run}\n=\n".encode())
        return _read_attempts(attempts if is_same_run else [])

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


def _read_attempts(attempts: list[str]) -> EarlierAttempts:
    """The rows that were running at the end of each attempt; all attempts in a log have ended."""
    found = EarlierAttempts()
    for attempt in attempts:
        running: dict[int, bool] = {}  # whether a row ran alone
        for line in attempt.splitlines():
            if re.fullmatch(r"[+!]\d+", line):  # a torn line counts for nothing
                running[int(line[1:])] = line[0] == "!"
            elif re.fullmatch(r"-\d+", line):
                running.pop(int(line[1:]), None)
        found.unexplained += not running
        for row, alone in running.items():
            found.suspects.add(row)
            if alone:
                found.tries[row] = found.tries.get(row, 0) + 1
    return found
