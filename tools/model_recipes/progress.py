"""Progress on stderr: one rewritten line on a terminal, plain lines elsewhere."""

import os
import sys
import time
from typing import TextIO

WIDTH = 24
INTERVAL = 0.1  # seconds between redraws


def megabytes(count: int) -> str:
    """A byte count in megabytes."""
    return f"{count / 1e6:.1f} MB"


class Progress:
    """The progress of one model: its name, its phase and the state of the phase."""

    def __init__(self, name: str, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.name = name
        self.stream = sys.stderr if stream is None else stream
        ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        self.live = (self.stream.isatty() and not ci) if live is None else live
        self._label = ""
        self._size = 0  # bytes of the phase, if known
        self._drawn = 0.0

    def phase(self, label: str, size: int = 0) -> None:
        """Enter a phase; `size` is its number of bytes where that is known."""
        self._label, self._size, self._drawn = label, size, 0.0
        if not self.live:
            self.line(label + (f" ({megabytes(size)})" if size else ""))
        elif size:
            self.update(0, size)
        else:
            self._write(f"\r\x1b[K{self.name}  {label} ...")

    def update(self, done: int, total: int) -> None:
        """Redraw the bar, at most every tenth of a second; silent without a terminal."""
        now = time.monotonic()
        if not self.live or (now - self._drawn < INTERVAL and done < total):
            return
        self._drawn = now
        part = min(done / total, 1.0) if total else 1.0
        filled = int(part * WIDTH)
        amount = f"{megabytes(done)} / {megabytes(total)}" if self._size else f"{part:.0%}"
        self._write(f"\r\x1b[K{self.name}  [{'#' * filled}{'.' * (WIDTH - filled)}]  {self._label}  {amount}")

    def line(self, text: str) -> None:
        """Print one permanent line, in place of the bar if one is drawn."""
        self._write(("\r\x1b[K" if self.live else "") + f"{self.name}: {text}\n")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
