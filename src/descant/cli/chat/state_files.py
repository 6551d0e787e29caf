"""Files of `descant chat` that outlive it: the history of lines, and conversations that ended by an error."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

__all__ = ["history_file", "rescue_file", "state_folder"]

_VARIABLE: Final = "XDG_STATE_HOME"


def state_folder() -> Path:
    """The folder of files that are kept from run to run, of this user only."""
    base = os.environ.get(_VARIABLE)
    if base and os.path.isabs(base):  # the XDG standard says that a relative path is ignored
        return Path(base) / "descant"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "descant"
    return Path.home() / ".local" / "state" / "descant"


def history_file() -> Path | None:
    """The file of typed lines, which only its owner can read; None where it cannot be written."""
    path = state_folder() / "chat-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)  # a file that others could read
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return path


def rescue_file() -> Path:
    """A new name for a conversation that ends by an error."""
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"chat-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
