"""transformers 4.52.4, in the venv that tools/reference_env.py builds: runs code and hands back what it
prints.

Migration pages show code as it was written before. It is run where it ran.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Transformers4Error(Exception):
    """What the code raised there, or why there is nobody to run it."""


class Transformers4:
    """A process of the old version, started by the first block; all blocks share one namespace."""

    def __init__(self) -> None:
        self.python = Path(
            os.environ.get("DESCANT_REFERENCE_PYTHON") or ROOT / ".reference" / "bin" / "python"
        )
        self.process: subprocess.Popen[str] | None = None

    def run(self, source: str, filename: str = "<before>") -> str:
        """Run code, and return what it printed."""
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise Transformers4Error("the pipe is gone")
        process.stdin.write(json.dumps([source, filename]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise Transformers4Error(f"{self.python} died with {process.wait()}")
        printed, error = json.loads(answer)
        if error:
            raise Transformers4Error(error)
        return str(printed)

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            if not self.python.exists():
                raise Transformers4Error(
                    f"found no {self.python}: build it with `python tools/reference_env.py`"
                )
            kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [str(self.python), __file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**kept, **quiet}, text=True,
            )  # fmt: skip
        return self.process


def serve() -> None:
    """The other side of the pipe."""
    import warnings

    warnings.simplefilter("ignore")
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints by other ways must not reach the pipe
    namespace: dict[str, Any] = {"__name__": "before"}
    for line in sys.stdin:
        source, filename = json.loads(line)
        printed, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, filename, "exec"), namespace)  # noqa: S102
        except Exception:
            error = traceback.format_exc()
        pipe.write(json.dumps([printed.getvalue(), error]) + "\n")
        pipe.flush()


if __name__ == "__main__":
    serve()
