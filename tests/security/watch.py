"""A watch over the whole suite: nothing that Descant does may unpickle, or read a file with `torch.load`.

Python tells audit hooks of every class that an unpickler looks up, and there is no way past them. A lookup
is Descant's when a frame of `src/descant` is on its stack, unless a pipe between processes stands nearer, or
torch's compiler, which keeps what it has made as pickles of its own. `torch.load` with `weights_only` looks
nothing up by that road, so it is watched by its name.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

SOURCE = os.path.join(str(Path(__file__).parents[2] / "src" / "descant"), "")
_EXEMPT = tuple(
    os.path.join("", *parts, "")
    for parts in (
        ("torch", "_dynamo"),
        ("torch", "_functorch"),
        ("torch", "_inductor"),
        ("multiprocessing",),
        ("concurrent", "futures"),
    )
)

found: list[str] = []
_lock = threading.Lock()


def _descants(frame: FrameType | None) -> str | None:
    """The innermost frame of a stack in Descant's source; None if there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            return f"{name.removeprefix(SOURCE)}:{frame.f_lineno}"
        if any(part in name for part in _EXEMPT):
            return None
        frame = frame.f_back
    return None


def _note(what: str, frame: FrameType | None) -> None:
    place = _descants(frame)
    if place is not None:
        with _lock:
            found.append(f"{what} under {place}")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _note(f"unpickled {arguments[0]}.{arguments[1]}", sys._getframe(1))


@functools.cache  # hooks cannot be taken away again, so once a process
def begin() -> None:
    """Watch this process from now on."""
    sys.addaudithook(_audit)
    load = torch.load

    @functools.wraps(load)
    def watched(*arguments: Any, **options: Any) -> Any:
        _note("torch.load", sys._getframe(1))
        return load(*arguments, **options)

    torch.load = torch.serialization.load = watched


def settle() -> None:
    """Fail if anything was seen since the last time."""
    with _lock:
        seen, found[:] = list(dict.fromkeys(found)), []
    if seen:
        pytest.fail("; ".join(seen), pytrace=False)
