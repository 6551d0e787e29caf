"""How far a process's memory rises while something runs, as the kernel counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType

__all__ = ["Peak"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """`with Peak() as peak`: then `peak.bytes` is the highest resident size over the one at the start.

    None where the kernel keeps no such mark that can be reset (anything but Linux).
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> Peak:
        _trim()
        try:
            _RESET.write_text("5", encoding="ascii")  # sets the high-water mark back to the present size
            self._before = _status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self.bytes = max(0, _status("VmHWM") - self._before)


def _trim() -> None:
    """Give freed memory back, so that what is needed next is seen to be taken; glibc alone can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
