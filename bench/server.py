"""`python -m bench.server`: the HTTP server against its engine, vLLM's server and `transformers serve`.

Each side runs the same requests: streams at once, greedy, of one length. Time is the CPU time of the side's
own process (and its children); that of the clients does not count. The sides take turns in rotating order.
Also printed is the share of the server's CPU time that threads other than its engine's have: what HTTP costs,
without the noise of two measurements. With `--latency` the time to the first token is measured at idle, one
request after the other, in seconds of the clock. A server of another project runs in the interpreter that its
option names.

`transformers serve` takes texts only. The prompts are plain words, whose text has the same tokens again, so
that it reads the same prompts as the other sides. An end token that does not exist makes it generate as many
tokens. It is two sides: by default it runs one request after the other; `batched` is its continuous batching.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import descant
from bench.other_servers import OtherServer, transformers_server, vllm_server
from bench.process_time import process_seconds, thread_seconds
from descant.models.kv_shape import kv_shape_of
from descant.models.loading.loading import load
from descant.serve.application import EngineOptions, start_engine
from tests.support.http_client import stream
from tests.support.server_process import ServerProcess

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_PROMPT_TOKENS = 32
_KV_BYTES = 2**30


class Load(NamedTuple):
    """Requests at once."""

    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def make(cls, words: Sequence[int], streams: int, new_tokens: int, seed: int) -> Load:
        """Prompts of random words, the same for each seed."""
        rng = random.Random(seed)
        prompts = [rng.choices(words, k=_PROMPT_TOKENS) for _ in range(streams)]
        return cls(prompts, new_tokens)


class Result(NamedTuple):
    """CPU seconds and tokens."""

    seconds: float
    tokens: int


Side = Callable[[Load], Result]
Body = Callable[[list[int], int], dict[str, Any]]


def plain_words(tokenizer: Any) -> list[int]:
    """The tokens that are a space and lower-case letters: a row of them is read from its text as it was."""
    size = len(tokenizer)
    words = [token for token in range(size) if re.fullmatch(" [a-z]{2,}", tokenizer.decode([token]))]
    if not words or tokenizer(tokenizer.decode(words))["input_ids"] != words:
        sys.exit("the tokens of this model's words cannot be read from their text: name another model")
    return words


def other_threads_share(before: dict[str, float], after: dict[str, float]) -> float:
    """The share of CPU time of all threads but the busiest one, which is the engine's."""
    seconds = [after[name] - before.get(name, 0.0) for name in after]
    return 1 - max(seconds) / sum(seconds)


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


def http_side(port: int, pid: int, body: Body) -> Side:
    """A server of another process, with one thread of this one for each stream."""

    def consume(prompt: list[int], new: int) -> int:
        used: dict[str, int] = {}
        for event in stream(port, "/v1/completions", body(prompt, new), timeout=600):
            if event != "[DONE]":
                used = event.get("usage") or used
        if (used.get("prompt_tokens"), used.get("completion_tokens")) != (len(prompt), new):
            raise RuntimeError(f"the server must read {len(prompt)} and generate {new} tokens, got {used}")
        return new

    def run(work: Load) -> Result:
        began = process_seconds(pid)
        with ThreadPoolExecutor(len(work.prompts)) as pool:
            tokens = sum(pool.map(lambda prompt: consume(prompt, work.new_tokens), work.prompts))
        return Result(process_seconds(pid) - began, tokens)

    return run


def ids_body(model: str, **extra: Any) -> Body:
    """Requests with token ids."""

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


def _own_body(model: str) -> Body:
    """Requests of the server itself; as the engine's, they may not end before their length."""
    return lambda prompt, new: ids_body(model, min_new_tokens=new)(prompt, new)


def text_body(model: str, tokenizer: Any) -> Body:
    """Requests of `transformers serve`, with texts."""

    def make(prompt: list[int], new: int) -> dict[str, Any]:
        # No token has this id. It generates `max_tokens` tokens, as the other sides do.
        config = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return {
            "model": model,
            "prompt": tokenizer.decode(prompt),
            "max_tokens": new,
            "stream": True,
            "generation_config": json.dumps(config),
        }

    return make


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


def _measure(sides: dict[str, Side], words: Sequence[int], args: argparse.Namespace) -> None:
    names = list(sides)
    for name in names:  # warm up
        sides[name](Load.make(words, args.streams, 4, 0))
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        turn = repeat % len(names)
        work = Load.make(words, args.streams, args.new_tokens, repeat + 1)
        for name in names[turn:] + names[:turn]:
            result = sides[name](work)
            rate = result.tokens / result.seconds
            found[name].append(rate)
            print(
                f"  repeat {repeat}: {name:20} {rate:8.1f} tokens a CPU second ({result.tokens})", flush=True
            )
    base = "server"
    for name in names:
        ratios = [own / other for own, other in zip(found[base], found[name], strict=True)]
        print(f"server / {name:20} {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


def _print_latency(sides: dict[str, Callable[[], None]], repeats: int) -> None:
    """The median time to the first token of each side, and how much more it is than the engine's."""
    for side in sides.values():  # warm up
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(first_token_seconds(side, 1))
    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    for name, median in medians.items():
        print(f"first token: {name:20} {median:7.1f} ms, {median - medians['engine']:+.1f} ms", flush=True)


@dataclass(frozen=True)
class HttpTarget:
    """A server that runs, and how it is asked."""

    port: int
    pid: int
    body: Body

    @classmethod
    def of(cls, server: OtherServer, body: Body) -> HttpTarget:
        return cls(server.port, server.process.pid, body)


def _other_servers(
    args: argparse.Namespace, tokenizer: Any, kv_tokens: int
) -> Iterator[tuple[str, OtherServer, Body]]:
    """The servers of other projects that the command line names."""
    model, logs = str(Path(args.model).resolve()), Path(args.logs)
    if args.vllm is not None:
        yield "vllm", vllm_server(args.vllm, model, logs / "vllm.log"), ids_body("model", ignore_eos=True)
    if args.transformers is not None:
        for name, is_batched in (("transformers", False), ("transformers batched", True)):
            log = logs / f"{name.replace(' ', '_')}.log"
            server = transformers_server(
                args.transformers, model, log, kv_tokens=kv_tokens, is_batched=is_batched
            )
            yield name, server, text_body(model, tokenizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = _parse(argv)
    torch.set_num_threads(1)
    model, tokenizer = load(args.model, "float32")
    words, kv_tokens = plain_words(tokenizer), _KV_BYTES // kv_shape_of(model).bytes_per_token
    eos = model.generation_config.eos_token_id
    engine = start_engine(model, EngineOptions(fast=args.fast, kv_bytes=_KV_BYTES, prefix_cache=False))
    options = ["--dtype", "float32", "--kv-memory", str(_KV_BYTES / 2**30), "--no-prefix-cache"]
    options += ["--fast"] if args.fast else []
    name = Path(args.model).name
    with ExitStack() as stack:
        stack.enter_context(engine)
        server = stack.enter_context(ServerProcess(args.model, *options, timeout=600))
        targets = {"server": HttpTarget(server.port, server.process.pid, _own_body(name))}
        for other, process, body in _other_servers(args, tokenizer, kv_tokens):
            targets[other] = HttpTarget.of(stack.enter_context(process), body)
        if args.latency:
            [prompt] = Load.make(words, 1, 2, 0).prompts
            first = {"engine": _engine_first_token(engine, prompt)}
            for other, one in targets.items():
                first[other] = _http_first_token(one.port, one.body(prompt, 2))
            _print_latency(first, args.latency)
        sides = {other: http_side(one.port, one.pid, one.body) for other, one in targets.items()}
        sides["engine"] = engine_side(engine, [eos] if isinstance(eos, int) else eos)
        before = thread_seconds(server.process.pid)
        _measure(sides, words, args)
        share = other_threads_share(before, thread_seconds(server.process.pid))
        print(f"threads beside the engine's have {share:.1%} of the server's CPU time")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="prepacked weights and compiled layers")
    parser.add_argument("--latency", type=int, default=0, metavar="N", help="first tokens of N requests")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM (tools/vllm_env.py)")
    parser.add_argument(
        "--transformers",
        metavar="PYTHON",
        help="an interpreter with `transformers serve` (tools/transformers_serve_env.py)",
    )
    parser.add_argument("--logs", default=".", help="where the logs of other servers go")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
