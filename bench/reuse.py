"""`python -m bench.reuse`: the time to the first token of a prompt with a cached prefix.

A cold call prefills everything. The others continue from a cache of `descant.prefill` of each kind, from one
loaded from disk, from a DynamicCache of an earlier turn, or from a session's prefix cache. All calls
alternate in each repeat; ratios are medians over repeats. CPU time, one thread. With `--bar` the exit code
says whether every call has this speedup over a cold call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import descant
from descant.models.compat.hf_caches.dynamic import DynamicCache

__all__ = ["build_calls", "main", "measure"]

Call = Callable[[], list[int]]  # returns the new tokens
_COLD = "cold"


def build_calls(model: Any, prefix: Tensor, ends: Sequence[Tensor], folder: Path) -> dict[str, Call]:
    """Calls that generate one token after each of several prompts with the same prefix [L]."""
    texts = [torch.cat((prefix, end)) for end in ends]
    ids = torch.stack(texts)
    call = {"max_new_tokens": 1, "do_sample": False}

    def cold() -> list[int]:
        return _new(descant.generate(model, ids, **call), ids)

    def with_cache(cache: Any) -> Call:
        return lambda: _new(descant.generate(model, ids, past_key_values=cache, **call), ids)

    calls: dict[str, Call] = {_COLD: cold}
    for kind in ("paged", "dynamic"):
        calls[f"prefill, {kind}"] = with_cache(descant.prefill(model, prefix, cache=kind))
    path = folder / "prefix.safetensors"
    descant.prefill(model, prefix).save(path)
    calls["prefill, from disk"] = with_cache(descant.load_cache(path, model))
    calls["an earlier turn"] = _next_turn(model, prefix, ids, call)
    calls["prefix cache"] = _session(model, prefix, texts)
    return calls


def _new(whole: Any, ids: Tensor) -> list[int]:
    tokens: list[int] = whole[:, ids.shape[1]].tolist()
    return tokens


def _next_turn(model: Any, prefix: Tensor, ids: Tensor, call: Mapping[str, Any]) -> Call:
    """The next turn of a conversation, on the cache of the last one."""
    first = DynamicCache()
    descant.generate(model, prefix[None], past_key_values=first, **call)
    first.read_only = True  # every repeat is the same turn

    def run() -> list[int]:
        return _new(descant.generate(model, ids, past_key_values=first, **call), ids)

    return run


def _session(model: Any, prefix: Tensor, texts: Sequence[Tensor]) -> Call:
    """Requests to a session with the prefix in its prefix cache."""
    session = descant.Session(model, prefix_cache=descant.PrefixCache(2**32))
    config = descant.GenerationConfig(max_new_tokens=1, do_sample=False)

    def run() -> list[int]:
        numbers = session.admit(*(descant.Request(text, config) for text in texts))
        ends = {one.request: one for one in session.drain() if isinstance(one, descant.Finished)}
        return [int(ends[number].hypotheses[0].tokens[0]) for number in numbers]

    session.admit(descant.Request(prefix, config))
    list(session.drain())
    return run


def measure(calls: Mapping[str, Call], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """The CPU seconds of every call by repeat, and the tokens of each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):
        for name, run in calls.items():
            start = time.process_time()
            tokens[name] = run()
            if repeat:  # the first warms up
                seconds[name].append(time.process_time() - start)
    return seconds, tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.reuse", description=__doc__)
    parser.add_argument("--model", default="models/smollm2", help="a folder with a model")
    parser.add_argument("--prefix", type=int, default=2048, help="length of the common prefix")
    parser.add_argument("--end", type=int, default=8, help="further tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="prompts per call")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bar", type=float, default=None, help="required speedup of every call")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    size = min(model.config.vocab_size, 16384)
    text = torch.randint(
        min(100, size // 4), size, (options.prefix + options.batch * options.end,), generator=generator
    )
    prefix, ends = text[: options.prefix], text[options.prefix :].view(options.batch, options.end)
    with tempfile.TemporaryDirectory() as folder:
        seconds, tokens = measure(build_calls(model, prefix, list(ends), Path(folder)), options.repeats)
    print(f"{options.prefix} + {options.end} tokens, batch {options.batch}, to the first token")
    print(f"{'call':<22}{'seconds':>9}{'x cold':>8}{'least':>8}  tokens")
    failed = []
    for name, times in seconds.items():
        ratios = [cold / one for cold, one in zip(seconds[_COLD], times, strict=True)]
        same = "same" if tokens[name] == tokens[_COLD] else "OTHER"
        median = statistics.median(ratios)
        print(f"{name:<22}{statistics.median(times):>9.3f}{median:>8.1f}{min(ratios):>8.1f}  {same}")
        if same != "same" or (options.bar is not None and name != _COLD and median < options.bar):
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
