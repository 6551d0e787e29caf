"""Client programs of others, which run in the environment of `tools/clients_env.py`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ClientEnvironment"]

ROOT = Path(__file__).resolve().parents[2]


class ClientEnvironment:
    """The environment in `.clients`, or that of DESCANT_CLIENTS_PYTHON; its programs have no network."""

    def __init__(self, scratch: Path) -> None:
        given = os.environ.get("DESCANT_CLIENTS_PYTHON")
        python = Path(given) if given else ROOT / ".clients" / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(
                f"the client programs have a venv of their own, found no {python}: "
                "build it with `python tools/clients_env.py`, or name one in DESCANT_CLIENTS_PYTHON"
            )
        self.bin = python.parent
        self.node_folder = python.parents[1] / "node"
        self.scratch = scratch

    def environment(self) -> dict[str, str]:
        """The variables of the programs; their files are in the scratch folder."""
        names = ("LANG", "LD_LIBRARY_PATH", "DESCANT_MODELS")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.scratch),
            "HF_HOME": str(self.scratch / "hub"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CLIENTS_NODE": str(self.node_folder),
        }

    def run(
        self,
        program: str,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> str:
        """What a program of the environment prints; it must end well."""
        done = subprocess.run(
            [str(self.bin / program), *map(str, arguments)],
            cwd=cwd or self.scratch,
            env={**self.environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise AssertionError(
                f"{program} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return done.stdout
