"""`python -m bench.reuse`: the time to the first token of a prompt whose beginning was read before.

A cold call reads everything; the others go on from a cache of `descant.prefill`, of each kind, from one that
came from disk, from a DynamicCache that an earlier turn filled, or from a session's prefix cache. Every way
takes its turn in each repeat; ratios are medians of each repeat's ratio. CPU time with one thread. With
`--bar` the exit code tells whether every way is so many times faster than a cold call.
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
from descant.models.hf_caches.exports import DynamicCache

__all__ = ["main", "measured", "ways"]

Way = Callable[[], list[int]]  # what a call writes
_COLD = "cold"


def ways(model: Any, prefix: Tensor, ends: Sequence[Tensor], folder: Path) -> dict[str, Way]:
    """Calls that write one token after each of several prompts with the same beginning [L]."""
    texts = [torch.cat((prefix, end)) for end in ends]
    ids = torch.stack(texts)
    call = {"max_new_tokens": 1, "do_sample": False}

    def cold() -> list[int]:
        return _new(descant.generate(model, ids, **call), ids)

    def after(cache: Any) -> Way:
        return lambda: _new(descant.generate(model, ids, past_key_values=cache, **call), ids)

    found: dict[str, Way] = {_COLD: cold}
    for kind in ("paged", "dynamic"):
        found[f"prefill, {kind}"] = after(descant.prefill(model, prefix, cache=kind))
    path = folder / "prefix.safetensors"
    descant.prefill(model, prefix).save(path)
    found["prefill, from disk"] = after(descant.load_cache(path, model))
    found["an earlier turn"] = _turn(model, prefix, ids, call)
    found["prefix cache"] = _session(model, prefix, texts)
    return found


def _new(whole: Any, ids: Tensor) -> list[int]:
    tokens: list[int] = whole[:, ids.shape[1]].tolist()
    return tokens


def _turn(model: Any, prefix: Tensor, ids: Tensor, call: Mapping[str, Any]) -> Way:
    """A conversation's next turn, on the cache that the last one filled."""
    first = DynamicCache()
    descant.generate(model, prefix[None], past_key_values=first, **call)
    first.read_only = True  # every repeat is the same turn

    def run() -> list[int]:
        return _new(descant.generate(model, ids, past_key_values=first, **call), ids)

    return run


def _session(model: Any, prefix: Tensor, texts: Sequence[Tensor]) -> Way:
    """Requests to a session that has met the beginning before."""
    session = descant.Session(model, prefix_cache=descant.PrefixCache(2**32))
    config = descant.GenerationConfig(max_new_tokens=1, do_sample=False)

    def run() -> list[int]:
        numbers = session.admit(*(descant.Request(text, config) for text in texts))
        ends = {one.request: one for one in session.drain() if isinstance(one, descant.Finished)}
        return [int(ends[number].hypotheses[0].tokens[0]) for number in numbers]

    session.admit(descant.Request(prefix, config))
    list(session.drain())
    return run


def measured(calls: Mapping[str, Way], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """The CPU seconds of every way, repeat by repeat, and what each wrote."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    wrote: dict[str, list[int]] = {}
    for turn in range(repeats + 1):
        for name, run in calls.items():
            began = time.process_time()
            wrote[name] = run()
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - began)
    return seconds, wrote


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.reuse", description=__doc__)
    parser.add_argument("--model", default="models/smollm2", help="a folder with a model")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens that prompts begin with")
    parser.add_argument("--end", type=int, default=8, help="tokens of its own that each prompt has")
    parser.add_argument("--batch", type=int, default=1, help="prompts a call")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bar", type=float, default=None, help="how many times faster every way must be")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    chance = torch.Generator().manual_seed(0)
    size = min(model.config.vocab_size, 16384)
    text = torch.randint(
        min(100, size // 4), size, (given.prefix + given.batch * given.end,), generator=chance
    )
    prefix, ends = text[: given.prefix], text[given.prefix :].view(given.batch, given.end)
    with tempfile.TemporaryDirectory() as folder:
        seconds, wrote = measured(ways(model, prefix, list(ends), Path(folder)), given.repeats)
    print(f"{given.prefix} + {given.end} tokens, batch {given.batch}, to the first token")
    print(f"{'way':<22}{'seconds':>9}{'x cold':>8}{'least':>8}  tokens")
    short = []
    for name, times in seconds.items():
        ratios = [cold / one for cold, one in zip(seconds[_COLD], times, strict=True)]
        same = "same" if wrote[name] == wrote[_COLD] else "OTHER"
        median = statistics.median(ratios)
        print(f"{name:<22}{statistics.median(times):>9.3f}{median:>8.1f}{min(ratios):>8.1f}  {same}")
        if same != "same" or (given.bar is not None and name != _COLD and median < given.bar):
            short.append(name)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
