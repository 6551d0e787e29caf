"""A real server in a process of its own, on a loopback port."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ServerProcess"]


class ServerProcess:
    """`descant serve MODEL ...` until the end of a `with` block; its log is in `entries`."""

    def __init__(
        self, model: str | Path, *options: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> None:
        start = "from descant.cli import main; main()"
        command = [sys.executable, "-c", start, "serve", str(model), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self.entries: list[dict[str, Any]] = []
        self.lines: list[str] = []  # that are no JSON
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        port = self._ready.get(timeout=timeout)
        if port is None:
            raise RuntimeError("the server has not started: " + "".join(self.lines)[-2000:])
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                self.lines.append(line)
                continue
            self.entries.append(entry)
            if entry.get("event") == "ready":
                self._ready.put(entry["addresses"][0][1])
        self._ready.put(None)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def terminate(self, timeout: float = 60) -> int:
        """Send SIGTERM and wait for the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def metric(self, name: str, key: str | None = None) -> float:
        """The value of a metric without labels, or the sum over its labels."""
        request = urllib.request.Request(f"{self.url}/metrics")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.partition("{")[0].split(" ")[0] == name]
        return sum(map(float, values))

    def wait_for_metric(self, name: str, value: float, timeout: float = 30, key: str | None = None) -> None:
        """Wait until a metric has a value."""
        end = time.monotonic() + timeout
        while (found := self.metric(name, key)) != value:
            if time.monotonic() > end:
                raise AssertionError(f"{name} is {found}, not {value}")
            time.sleep(0.05)
