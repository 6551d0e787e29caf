"""The tests' side of the pipe: starts the reference at its first request and keeps it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.reference.process import wire

ROOT = Path(__file__).resolve().parents[3]
VERSION = "4.52.4"


class ReferenceFailure(Exception):
    """What the reference raised: `type` and `message` are the original's."""

    def __init__(self, error: Mapping[str, str]) -> None:
        super().__init__(f"{error['type']}: {error['message']}\n{error['traceback']}")
        self.type = error["type"]
        self.message = error["message"]


class ReferenceClient:
    """transformers 4.52.4 in its own process; `tests/reference/process/worker.py` lists its requests."""

    def __init__(self, python: Path | None = None) -> None:
        default = os.environ.get("DESCANT_REFERENCE_PYTHON") or ROOT / ".reference" / "bin" / "python"
        self.python = Path(python or default)
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Any = None

    def ask(self, op: str, **fields: Any) -> Any:
        """Send one request and wait for its answer."""
        process = self._started()
        assert process.stdin
        assert process.stdout
        try:
            wire.send(process.stdin, {"op": op, **fields})
            answer = wire.receive(process.stdout)
        except (wire.Closed, BrokenPipeError) as error:
            said = f"the reference died ({process.wait()}):\n{self._tail()}"
            self.close()
            raise RuntimeError(said) from error
        if "error" in answer:
            raise ReferenceFailure(answer["error"])
        return answer["ok"]

    def generate(
        self,
        model: Path | str,
        inputs: Mapping[str, Any],
        arguments: Mapping[str, Any],
        want: Sequence[str] = ("sequences",),
        *,
        seed: int | None = None,
        load: Mapping[str, Any] | None = None,
        objects: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`model.generate` there; `want` names the fields of the output to send back."""
        return self.ask(
            "generate",
            model=str(model),
            inputs=dict(inputs),
            arguments=dict(arguments),
            want=list(want),
            seed=seed,
            load=dict(load or {}),
            objects=dict(objects or {}),
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            if self.process.stdout:
                self.process.stdout.close()
            self.log.close()
            self.process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            if not self.python.exists():
                raise RuntimeError(
                    f"the reference is transformers {VERSION} in a venv of its own, found no {self.python}: "
                    "build it with `python tools/reference_env.py`, "
                    "or name its python in DESCANT_REFERENCE_PYTHON"
                )
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
            environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                [str(self.python), "-m", "tests.reference.process.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                cwd=ROOT,
                env=environment,
            )
            found = self.ask("ping")["transformers"]
            if found != VERSION:
                raise RuntimeError(f"the reference must be transformers {VERSION}, {self.python} has {found}")
        return self.process

    def _tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:].decode(errors="replace")
