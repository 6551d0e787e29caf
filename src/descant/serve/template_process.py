"""Processes that render chat templates, each killed and replaced when a template takes too long."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from descant.serve import template_worker

__all__ = ["NUM_PROCESSES", "RenderLimits", "TemplateError", "TemplateProcesses", "UnreadVariable"]

NUM_PROCESSES: Final = 2
_HEAD: Final = 8


class TemplateError(Exception):
    """A template that cannot be rendered; the text says why."""


class UnreadVariable(Exception):
    """A variable that the template does not read; the text is its name."""


class _ProcessEnded(Exception):
    """The process has ended or takes too long."""


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What one text may cost."""

    cpu_seconds: float = 0.5
    wall_seconds: float = 20.0  # on a machine with much else to do, processor time comes slowly
    max_memory: int = 512 * 2**20  # of the address space of a process
    max_message: int = 64 * 2**20  # bytes of the messages and their variables
    max_chars: int = 16 * 2**20  # of the text


class _TemplateProcess:
    """One process; starts with its first text."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, body: bytes) -> dict[str, Any]:
        """The answer to a message; raises if the process ends instead."""
        limits = self._limits
        try:
            process = self._process or self._start()
            answer = _exchange(process, body, limits.wall_seconds, 8 * limits.max_chars)
        except _ProcessEnded:
            self.close()
            raise
        found: dict[str, Any] = json.loads(answer)
        if found.get("is_spent"):
            self.close()
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", template_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/" if sys.platform != "win32" else None,
            env={},  # the keys of the server are in its own
            start_new_session=True,  # Ctrl-C is for the server, which ends its requests first
        )
        self._process = process
        limits = self._limits
        options = {
            "path": [one for one in sys.path if one],
            "cpu_seconds": limits.cpu_seconds,
            "max_memory": limits.max_memory,
            "max_message": limits.max_message,
            "max_chars": limits.max_chars,
        }
        _exchange(process, json.dumps(options).encode(), 60.0, 2**20)
        return process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()


def _exchange(process: subprocess.Popen[bytes], body: bytes, seconds: float, max_bytes: int) -> bytes:
    """Send a message and wait for the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + seconds
    try:
        # The process reads a whole message before it does anything, so this does not wait for a template.
        rest = memoryview(len(body).to_bytes(_HEAD, "big") + body)
        while rest:
            rest = rest[process.stdin.write(rest) or 0 :]
        size = int.from_bytes(_read(process.stdout, _HEAD, end), "big")
        if size > max_bytes:
            raise _ProcessEnded
        return _read(process.stdout, size, end)
    except (OSError, ValueError):  # a closed file is a ValueError
        raise _ProcessEnded from None


def _read(stream: Any, size: int, end: float) -> bytes:
    parts = []
    while size:
        if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
            raise _ProcessEnded
        part = stream.read(min(size, 2**20))
        if not part:
            raise _ProcessEnded
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class TemplateProcesses:
    """A few processes, which threads share."""

    def __init__(self, count: int = NUM_PROCESSES, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._all = [_TemplateProcess(self._limits) for _ in range(count)]
        self._idle: queue.LifoQueue[_TemplateProcess] = queue.LifoQueue()
        for one in self._all:
            self._idle.put(one)

    def render(self, template: str, variables: dict[str, Any], needed: Collection[str] = ()) -> str:
        """The text of a template; raises where it has none, costs too much, or does not read all `needed`."""
        try:
            body = json.dumps({"template": template, "variables": variables}).encode()
        except RecursionError:
            raise TemplateError("the messages are nested too deeply") from None
        if len(body) > self._limits.max_message:
            raise TemplateError("the messages are too long")
        process = self._idle.get()
        try:
            found = process.render(body)
        except _ProcessEnded:
            raise TemplateError("it takes too long, or too much memory") from None
        finally:
            self._idle.put(process)
        if "text" not in found:
            raise TemplateError(found["error"])
        for name in needed:
            if name in found["unread"]:
                raise UnreadVariable(name)
        return str(found["text"])

    def close(self) -> None:
        """End all processes, also those that render."""
        for one in self._all:
            one.close()
