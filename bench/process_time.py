"""The CPU time of processes and their threads, by what the kernel counts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

__all__ = ["ProcessWatch", "process_family", "process_seconds", "thread_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """The CPU seconds of a process and its descendants, with those that have ended and were waited for."""
    total = 0.0
    for one in process_family(pid):
        fields = _fields(Path(f"/proc/{one}/stat"))
        total += sum(map(int, fields[11:15])) / _TICKS if fields else 0.0
    return total


def thread_seconds(pid: int, *, descendants: bool = False) -> dict[str, float]:
    """The CPU seconds of each thread of a process that runs, and of its descendants if asked for."""
    found = {}
    for one in process_family(pid) if descendants else [pid]:
        for task in _tasks(one):
            fields = _fields(task / "stat")
            if fields:
                found[task.name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


class ProcessWatch:
    """The CPU time of a process and its descendants, those included that end and that nobody waits for.

    A thread looks at them from time to time: what a process does between the last look and its end is lost.
    """

    def __init__(self, pid: int, pause: float = 0.5) -> None:
        self._pid, self._pause = pid, pause
        self._found: dict[tuple[int, str], float] = {}  # by process and the time when it began
        self._own = 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self) -> float:
        """The CPU seconds so far."""
        with self._lock:
            for one in process_family(self._pid):
                fields = _fields(Path(f"/proc/{one}/stat"))
                if fields:
                    self._found[one, fields[19]] = (int(fields[11]) + int(fields[12])) / _TICKS
            return sum(self._found.values())

    def own_seconds(self) -> float:
        """The CPU seconds of the watch itself, which are those of this process."""
        return self._own

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            self.seconds()
            self._own = time.thread_time()


def process_family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    pids = [pid]
    while pids:
        one = pids.pop()
        yield one
        for task in _tasks(one):
            try:
                pids += map(int, (task / "children").read_text().split())
            except OSError:
                continue  # it has ended


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _fields(stat: Path) -> list[str]:
    """What follows the name in a `stat` file; empty: its process has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []
