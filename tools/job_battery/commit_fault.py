"""Kill a process in the middle of a commit: after a file is written, before or after it has its name.

A process takes part if it calls `install`, or if the folder `site` beside this file is on its PYTHONPATH. It
then watches for the file that DESCANT_COMMIT_FAULT names. The next commit removes that file and ends with
SIGKILL. The file says when: "before" or "after".
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["SITE", "VARIABLE", "arm", "install"]

VARIABLE = "DESCANT_COMMIT_FAULT"
SITE = Path(__file__).parent / "site"


def arm(token: Path, moment: str) -> None:
    """Let the next commit end its process."""
    partial = token.with_suffix(".new")
    partial.write_text(moment)
    partial.rename(token)


def install(module: ModuleType, token: str) -> None:
    """Watch the commits of `descant.core.atomic_file` in this process."""
    publish = module._publish

    def watched(pending: Any, target: str, exclusive: bool = False) -> None:
        moment = _take(token) if os.path.basename(target).startswith("shard-") else None
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(pending, target, exclusive)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    module._publish = watched  # type: ignore[attr-defined]


def _take(token: str) -> str | None:
    """What the file says, for the one process that removes it."""
    with contextlib.suppress(OSError):
        with open(token, encoding="ascii") as file:
            moment = file.read()
        os.unlink(token)
        return moment
    return None
