"""A store of results: every unit is a file, so runs can continue, and several processes share the work."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Store"]


class Store:
    """A folder of finished units."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a unit; computed here unless another process has computed it or is computing it."""
        path = self.folder / f"{name}.json"
        while not path.exists():
            with self._claim(path) as claimed:
                if claimed and not path.exists():
                    start = time.perf_counter()
                    result = json.dumps(compute())
                    part = path.with_suffix(".part")
                    part.write_text(result, encoding="utf-8")
                    part.replace(path)
                    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
                elif not claimed:
                    time.sleep(1.0)
        return json.loads(path.read_text(encoding="utf-8"))

    def free(self, name: str) -> bool:
        """Whether the unit is neither computed nor claimed."""
        path = self.folder / f"{name}.json"
        return not path.exists() and not _alive(path.with_suffix(".claim"))

    @contextlib.contextmanager
    def _claim(self, path: Path) -> Iterator[bool]:
        """Claim a unit; whether this process has the claim."""
        claim = path.with_suffix(".claim")
        claim.parent.mkdir(parents=True, exist_ok=True)
        if claim.exists() and not _alive(claim):
            claim.unlink(missing_ok=True)
        try:
            with claim.open("x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            yield False
            return
        try:
            yield True
        finally:
            claim.unlink(missing_ok=True)


def _alive(claim: Path) -> bool:
    """Whether the process of a claim still runs; a new claim file may still be empty."""
    try:
        pid = claim.read_text(encoding="utf-8")
        if not pid:
            return time.time() - claim.stat().st_mtime < 60.0
        os.kill(int(pid), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
