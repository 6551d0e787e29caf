"""A process of transformers 4.52.4, in the venv of tools/reference_env.py: runs code, returns its output.

The migration pages show code for that version. This runs it.
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
    """The error of the code there, or the reason why the process is unavailable."""


class Transformers4:
    """A process of the old version, started by the first block; all blocks share one namespace."""

    def __init__(self) -> None:
        self.python = Path(
            os.environ.get("DESCANT_REFERENCE_PYTHON") or ROOT / ".reference" / "bin" / "python"
        )
        self.process: subprocess.Popen[str] | None = None

    def run(self, source: str, filename: str = "<before>") -> str:
        """Run code, and return its output."""
        process = self._ensure_process()
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
        """End the process, if it runs."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def _ensure_process(self) -> subprocess.Popen[str]:
        if self.process is None:
            if not self.python.exists():
                raise Transformers4Error(
                    f"found no {self.python}: build it with `python tools/reference_env.py`"
                )
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            settings = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [str(self.python), __file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=inherited | settings, text=True,
            )  # fmt: skip
        return self.process


def serve() -> None:
    """The loop of the child process."""
    import warnings

    warnings.simplefilter("ignore")
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of C libraries must not reach the pipe
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
