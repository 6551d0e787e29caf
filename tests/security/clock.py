"""CPU time of a call, independent of earlier work of the process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spent() -> Iterator[list[float]]:
    """A list to which the CPU seconds of the block are added when it ends, however it ends.

    The garbage collector waits so long: to look through all that a worker holds after half an hour of tests
    takes seconds, and whose turn that is is chance.
    """
    seconds: list[float] = []
    paused = gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        yield seconds
    finally:
        seconds.append(time.process_time() - start)
        if paused:
            gc.enable()
