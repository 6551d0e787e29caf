"""The CPU time of processes and their threads, by what the kernel counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["process_seconds", "thread_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """The CPU seconds of a process and its descendants, with those that have ended and were waited for."""
    total = 0.0
    for one in _family(pid):
        fields = _fields(Path(f"/proc/{one}/stat"))
        total += sum(map(int, fields[11:15])) / _TICKS if fields else 0.0
    return total


def thread_seconds(pid: int, *, descendants: bool = False) -> dict[str, float]:
    """The CPU seconds of each thread of a process that runs, and of its descendants if asked for."""
    found = {}
    for one in _family(pid) if descendants else [pid]:
        for task in _tasks(one):
            fields = _fields(task / "stat")
            if fields:
                found[task.name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _family(pid: int) -> Iterator[int]:
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
