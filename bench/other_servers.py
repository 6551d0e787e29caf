"""Servers of other projects, each in the interpreter of its own environment."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

__all__ = ["OtherServer", "transformers_server", "vllm_server"]

_KV_BLOCK_TOKENS = 256


class OtherServer:
    """A server of another project, until the end of a `with` block."""

    def __init__(self, command: list[str], port: int, env: dict[str, str], log: Path) -> None:
        self.port = port
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )

    def __enter__(self) -> OtherServer:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return self
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server has ended, see {self._log.name}") from None
                time.sleep(1)
        raise TimeoutError(self._log.name)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


def vllm_server(python: str, model: str, log: Path) -> OtherServer:
    """vLLM's server, with the name `model` for the model."""
    port = _free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "model"]
    command += ["--no-enable-prefix-caching", "--max-num-seqs", "64"]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
    }
    return OtherServer(command, port, env, log)


def transformers_server(
    python: str, model: str, log: Path, *, kv_tokens: int, is_batched: bool
) -> OtherServer:
    """`transformers serve`: requests one after the other as by default, or with continuous batching.

    The KV pool of the batch has `kv_tokens` tokens; by itself it would take most of the memory.
    """
    port = _free_port()
    command = [python, "-m", "transformers.cli.transformers", "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    if is_batched:
        blocks = max(1, kv_tokens // _KV_BLOCK_TOKENS)
        command += ["--continuous-batching", "--cb-block-size", str(_KV_BLOCK_TOKENS)]
        command += ["--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "2048"]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return OtherServer(command, port, env, log)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
