"""One process per architecture, forked after all imports, with limits and a timeout."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.sweep.subject import Entry
from tools.sweep.trial import Stage, blank

__all__ = ["Limits", "each"]

Trial = Callable[[Entry, Stage], dict[str, Any]]


@dataclass(frozen=True)
class Limits:
    """The resource limits of one architecture."""

    seconds: int = 20  # of CPU time
    patience: float = 10.0  # wall-clock limit as a multiple of the CPU limit
    memory: int = 8 << 30  # bytes of address space


@dataclass
class _Child:
    """One running process."""

    entry: Entry
    pid: int
    stage: Path
    answer: Path
    started: float = field(default_factory=time.monotonic)
    late: bool = False
    status: int = 0  # of waitpid


def each(
    entries: Sequence[Entry], trial: Trial, jobs: int = 1, limits: Limits | None = None
) -> Iterator[dict[str, Any]]:
    """The record of every entry as it finishes, `jobs` processes at a time."""
    limits = limits or Limits()
    waiting, running = list(reversed(entries)), list[_Child]()
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(waiting.pop(), trial, Path(folder), limits))
                done = [child for child in running if _has_ended(child, limits)]
                running = [child for child in running if child not in done]
                for child in done:
                    yield _record(child, limits)
                if not done:
                    time.sleep(0.02)
        finally:
            for child in running:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)


def _start(entry: Entry, trial: Trial, folder: Path, limits: Limits) -> _Child:
    stage, answer = folder / f"{entry.name}.stage", folder / f"{entry.name}.json"
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Libraries may have started threads; the child needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return _Child(entry, pid, stage, answer)
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _silence()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent would end it with a code
        record = trial(entry, lambda name: _write(stage, name))
        record["cpu"] = round(time.process_time(), 3)
        _write(answer, json.dumps(record))
        code = 0
    finally:
        # The parent's handlers and buffers must not run here.
        os._exit(code)
    raise AssertionError  # not reached


def _silence() -> None:
    """Discard the output of models."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _has_ended(child: _Child, limits: Limits) -> bool:
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        child.status = status
        return True
    if not child.late and time.monotonic() - child.started > limits.seconds * limits.patience:
        child.late = True
        os.kill(child.pid, signal.SIGKILL)
    return False


def _record(child: _Child, limits: Limits) -> dict[str, Any]:
    """The record that a process wrote, or one about how it died."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        record: dict[str, Any] = json.loads(child.answer.read_text(encoding="utf-8"))
        return record
    stage = child.stage.read_text(encoding="utf-8") if child.stage.exists() else "start"
    # A death before the `descant` stage is a failure of transformers.
    status = "fails" if stage == "descant" else "not tried"
    return blank(child.entry) | {"status": status, "reason": f"{_end(child, limits)} ({stage})"}


def _end(child: _Child, limits: Limits) -> str:
    if child.late:
        return f"ended after {limits.seconds * limits.patience:g} seconds by the clock"
    code = os.waitstatus_to_exitcode(child.status)
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"used up {limits.seconds} seconds of CPU time"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code} and no record"
