"""The peak memory of a process during a block, as counted by the kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType

__all__ = ["Peak", "resident_bytes"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """`with Peak() as peak`: `peak.bytes` is the peak resident size above the size at the start.

    None where the kernel has no resettable high-water mark (anything but Linux).
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> Peak:
        _trim()
        try:
            _RESET.write_text("5", encoding="ascii")  # resets the high-water mark to the current size
            self._before = _status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self.bytes = max(0, _status("VmHWM") - self._before)


def resident_bytes() -> int:
    """The resident size of this process."""
    return _status("VmRSS")


def _trim() -> None:
    """Return freed memory to the system, so that new allocations are counted; only with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
