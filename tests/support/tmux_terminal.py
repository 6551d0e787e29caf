"""A real terminal: a program in tmux, keys that are typed into it, and the screen that it shows."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 120.0  # for what takes a model, on a busy machine
WIDTH, HEIGHT = 100, 50


def require_tmux() -> None:
    """Skip a test where there is no tmux; in CI it must be there."""
    if shutil.which("tmux") is None:
        reason = "tmux is not installed: apt-get install tmux"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    @classmethod
    @contextmanager
    def running(cls, command: Sequence[str], **environment: str) -> Iterator[Terminal]:
        """Run a command; its exit code is shown when it ends."""
        settings = [f"{name}={value}" for name, value in _environment(environment).items()]
        line = f'env {shlex.join([*settings, *command])}; echo "exit code $?"; exec sleep 1000'
        # A socket of its own: the server of another terminal may still be ending. Its path must be short.
        with tempfile.TemporaryDirectory(prefix="tmux", ignore_cleanup_errors=True) as folder:
            terminal = cls(Path(folder) / "socket")
            terminal.tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), line)
            try:
                yield terminal
            finally:
                terminal.tmux("kill-server", check=False)

    def tmux(self, *arguments: str, check: bool = True) -> str:
        """Run a command of tmux on the server of this terminal."""
        done = subprocess.run([*self._tmux, *arguments], check=check, capture_output=True, text=True)
        return done.stdout

    def type(self, *keys: str) -> None:
        """Press keys by tmux's names; other text is typed as it is."""
        self.tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste text as a terminal does, in one piece between brackets."""
        self.tmux("set-buffer", "--", text)
        self.tmux("paste-buffer", "-p")

    def screen(self) -> str:
        """What is shown now, without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.tmux("capture-pane", "-p").splitlines()).rstrip()

    def wait(self, title: str, shown: Callable[[str], bool]) -> str:
        """Wait for a screen, and print it."""
        end = time.monotonic() + SECONDS
        while not shown(screen := self.screen()):
            if time.monotonic() > end:
                pytest.fail(f"{title}: not shown within {SECONDS} s; the screen is\n{screen}")
            time.sleep(0.1)
        print(f"--- {title}\n{screen}\n")
        return screen


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    passed = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "HOME")
    return {**{name: os.environ[name] for name in passed if name in os.environ}, "NO_COLOR": "1", **given}
