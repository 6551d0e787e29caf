"""Shortened messages of errors that other libraries raise."""

from __future__ import annotations

from typing import Final

from descant.errors import format_value

__all__ = ["first_line"]

_MAX_CHARS: Final = 300


def first_line(error: BaseException) -> str:
    """The first line of an error's message, truncated to fit into one of ours."""
    lines = str(error).strip().splitlines()
    line = lines[0].rstrip(".: ") if lines else format_value(error)
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 3] + "..."
