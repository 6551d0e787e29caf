"""Nodes of a Ray cluster on this machine, each a process that ends all its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ray.util import get_node_ip_address

__all__ = ["RayNode"]

_START_SECONDS = 120.0


class RayNode:
    """`ray start --block`: the head of a new cluster, or a further node of one."""

    def __init__(self, num_cpus: int, env: Mapping[str, str], head: str | None = None) -> None:
        # Ray has sockets in this folder, whose paths must be short.
        self._files = tempfile.mkdtemp(prefix="ray")
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--num-cpus={num_cpus}"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        if head is None:
            port = _free_port()
            # Ray replaces 127.0.0.1 in an address by this.
            head = f"{get_node_ip_address()}:{port}"
            command += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._files}"]
        else:
            command += [f"--address={head}"]
        self.address = head
        self.log = Path(self._files) / "node.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=dict(env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Self:
        host, _, port = self.address.partition(":")
        end = time.monotonic() + _START_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return self
            time.sleep(0.2)
        text = self.log.read_text()[-2000:]
        self.__exit__()
        raise RuntimeError(f"the node has not started: {text}")

    def kill(self) -> None:
        """End the node at once, with all its processes."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._files, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found
