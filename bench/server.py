"""`python -m bench.server`: the HTTP server against its engine, vLLM's server and `transformers serve`.

Each side runs the same requests: streams at once, greedy, of one length. Time is the CPU time of the side's
own process (and its children); that of the clients does not count. The sides take turns in rotating order.
With `--latency` the time to the first token is measured at idle, one request after the other, in seconds of
the clock. A server of another project runs in the interpreter that its option names.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import descant
from descant.models.loading import load
from descant.serve.assembly import EngineOptions, start_engine
from tests.support.http_client import stream
from tests.support.server_process import ServerProcess

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    """Requests at once."""

    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def make(cls, streams: int, prompt_tokens: int, new_tokens: int, seed: int) -> Load:
        rng = random.Random(seed)
        prompts = [[rng.randrange(10, 1000) for _ in range(prompt_tokens)] for _ in range(streams)]
        return cls(prompts, new_tokens)


class Result(NamedTuple):
    """CPU seconds and tokens."""

    seconds: float
    tokens: int


Side = Callable[[Load], Result]


def process_seconds(pid: int) -> float:
    """The CPU seconds of a process and its descendants."""
    total, pids = 0.0, [pid]
    while pids:
        one = pids.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def engine_side(engine: descant.AsyncEngine, eos: Sequence[int]) -> Side:
    """The engine in this process, with one task for each stream."""

    async def consume(prompt: list[int], new: int) -> int:
        config = descant.GenerationConfig(max_new_tokens=new, min_new_tokens=new, eos_token_id=list(eos))
        count = 0
        async for event in engine.stream(descant.Request(prompt, config)):
            count += isinstance(event, descant.NewToken)
        return count

    async def run_all(work: Load) -> int:
        return sum(await asyncio.gather(*(consume(prompt, work.new_tokens) for prompt in work.prompts)))

    def run(work: Load) -> Result:
        began = time.process_time()
        tokens = asyncio.run(run_all(work))
        return Result(time.process_time() - began, tokens)

    return run


def http_side(port: int, pid: int, body: Callable[[list[int], int], dict[str, Any]]) -> Side:
    """A server of another process, with one thread of this one for each stream."""

    def consume(prompt: list[int], new: int) -> int:
        count = 0
        for event in stream(port, "/v1/completions", body(prompt, new), timeout=600):
            if event != "[DONE]" and event.get("usage"):
                count = event["usage"]["completion_tokens"]
        return count

    def run(work: Load) -> Result:
        began = process_seconds(pid)
        with ThreadPoolExecutor(len(work.prompts)) as pool:
            tokens = sum(pool.map(lambda prompt: consume(prompt, work.new_tokens), work.prompts))
        return Result(process_seconds(pid) - began, tokens)

    return run


def _body(model: str, **extra: Any) -> Callable[[list[int], int], dict[str, Any]]:
    def make(prompt: list[int], new: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    return make


class OtherServer:
    """A server of another project, until the end of a `with` block."""

    def __init__(self, command: list[str], port: int, env: dict[str, str], log: Path) -> None:
        self.port = port
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )

    def __enter__(self) -> OtherServer:
        import urllib.request

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


def vllm_server(python: str, model: str, port: int, log: Path) -> OtherServer:
    """vLLM's server in its own environment."""
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


def first_token_seconds(side: Callable[[], Any], repeats: int) -> float:
    """The median time to the first token, one request after the other."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        side()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _engine_first_token(engine: descant.AsyncEngine, prompt: list[int]) -> Callable[[], None]:
    async def first() -> None:
        async for _ in engine.stream(descant.Request(prompt, descant.GenerationConfig(max_new_tokens=2))):
            break

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return lambda: asyncio.run_coroutine_threadsafe(first(), loop).result()


def _http_first_token(port: int, body: dict[str, Any]) -> Callable[[], None]:
    def first() -> None:
        events = stream(port, "/v1/completions", body)
        next(events)
        events.close()

    return first


def _measure(sides: dict[str, Side], args: argparse.Namespace) -> None:
    work = Load.make(args.streams, 32, args.new_tokens, 0)
    names = list(sides)
    for name in names:  # warm up
        sides[name](Load(work.prompts, 4))
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            result = sides[name](Load.make(args.streams, 32, args.new_tokens, repeat + 1))
            rate = result.tokens / result.seconds
            found[name].append(rate)
            print(
                f"  repeat {repeat}: {name:14} {rate:8.1f} tokens a CPU second ({result.tokens})", flush=True
            )
    base = "server"
    for name in names:
        ratios = [own / other for own, other in zip(found[base], found[name], strict=True)]
        print(f"server / {name:14} {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="prepacked weights and compiled layers")
    parser.add_argument("--latency", type=int, default=0, metavar="N", help="first tokens of N requests")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM (tools/vllm_env.py)")
    parser.add_argument("--logs", default=".", help="where the logs of other servers go")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, _ = load(args.model, "float32")
    eos = model.generation_config.eos_token_id
    engine = start_engine(model, EngineOptions(fast=args.fast, kv_bytes=2**30, prefix_cache=False))
    options = [
        "--dtype",
        "float32",
        "--kv-memory",
        "1",
        "--no-prefix-cache",
        *(["--fast"] if args.fast else []),
    ]
    name = Path(args.model).name
    with engine, ServerProcess(args.model, *options, timeout=600) as server:
        own = http_side(
            server.port, server.process.pid, lambda prompt, new: _body(name, min_new_tokens=new)(prompt, new)
        )
        sides: dict[str, Side] = {
            "server": own,
            "engine": engine_side(engine, [eos] if isinstance(eos, int) else eos),
        }
        if args.latency:
            prompt = list(range(100, 132))
            _print_latency(engine, server.port, prompt, _body(name)(prompt, 2), args.latency)
        if args.vllm is None:
            _measure(sides, args)
            return
        with vllm_server(
            args.vllm, str(Path(args.model).resolve()), 8190, Path(args.logs) / "vllm.log"
        ) as other:
            sides["vllm"] = http_side(other.port, other.process.pid, _body("model", ignore_eos=True))
            _measure(sides, args)


def _print_latency(
    engine: descant.AsyncEngine, port: int, prompt: list[int], body: dict[str, Any], repeats: int
) -> None:
    sides = {"engine": _engine_first_token(engine, prompt), "server": _http_first_token(port, body)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(first_token_seconds(side, 1))
    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    gap = medians["server"] - medians["engine"]
    print(f"first token: engine {medians['engine']:.1f} ms, server {medians['server']:.1f} ms, {gap:+.1f} ms")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
