"""The exit codes of the command line."""

from __future__ import annotations

from typing import Final

__all__ = ["BROKEN_PIPE", "FAILURE", "INTERRUPTED", "USAGE"]

FAILURE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # as of shells for the signal
BROKEN_PIPE: Final = 141
