"""`python -m bench.beams`: many rows of one prompt on the paged cache, against transformers' own generate().

Beam search and `num_return_sequences` on a long prompt. Both alternate in one run; median CPU time, one
thread. The copied slots of the cache are counted for several prompt lengths. Its peak is compared with the
size of one prompt and one suffix per row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import descant
from bench.models import fast_copy
from descant.kv_cache.stores.paged import PagedStore

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "beams": lambda rows: {"num_beams": rows, "do_sample": False},
    "sequences": lambda rows: {"num_return_sequences": rows, "do_sample": True, "top_k": 50},
}


class CacheUsage(NamedTuple):
    """Copies and memory of the cache in one run."""

    copied_slots: float  # copied slots per step
    peak: int  # bytes
    minimum: int  # bytes of one prompt and one suffix per row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases; 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.beams", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--beams", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", choices=tuple(CASES), action="append")
    parser.add_argument("--faster", type=float, default=2.0, help="required speedup")
    parser.add_argument("--larger", type=float, default=1.3, help="allowed multiple of the minimal memory")
    parser.add_argument("--fast", action="store_true", help="prepacked weights and compiled layers for ours")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    own = fast_copy(model) if options.fast else model
    passed = True
    for name in options.only or CASES:
        rows = getattr(options, name)
        fields = CASES[name](rows)
        ids = _random_prompt(model, options.prompt)
        for length in (options.prompt // 4, options.prompt // 2, options.prompt):
            usage = cache_usage(model, ids[:, :length], options.new, rows, fields)
            ratio = usage.peak / usage.minimum
            print(
                f"{name} x {rows}, prompt {length}, {options.new} new: "
                f"{usage.copied_slots:.1f} slots copied a step, "
                f"peak {usage.peak / 2**20:.1f} MiB, {ratio:.2f} x one prompt and {rows} suffixes",
                flush=True,
            )
            passed &= ratio <= options.larger
        ratio = speedup(model, ids, options.new, fields, options.repeats, own)
        print(f"{name} x {rows}, prompt {options.prompt}: {ratio:.2f} x as fast as transformers", flush=True)
        passed &= ratio >= options.faster
    return 0 if passed else 1


def cache_usage(model: Any, ids: torch.Tensor, new: int, rows: int, fields: dict[str, Any]) -> CacheUsage:
    """Copies and memory of the cache in one run."""
    cache = PagedStore()
    session = descant.Session(model, cache=cache)
    config = descant.GenerationConfig(max_new_tokens=new, min_new_tokens=new, **fields)
    session.admit(descant.Request(ids[0], config))
    peak = 0
    session.step()
    slot_bytes = cache.nbytes // (-(-ids.shape[1] // cache.pool.block_size) * cache.pool.block_size)
    while len(session):
        session.step()
        peak = max(peak, cache.nbytes)
    # The last token is never fed, so a suffix has one position less.
    return CacheUsage(
        cache.copied_slots / session.steps, peak, slot_bytes * (ids.shape[1] + rows * (new - 1))
    )


def speedup(
    model: Any, ids: torch.Tensor, new: int, fields: dict[str, Any], repeats: int, own: Any = None
) -> float:
    """The speedup of ours over transformers' own generate(), run in turn; `own` is a copy for ours."""
    own = model if own is None else own
    extra = {"max_new_tokens": new, "min_new_tokens": new, "attention_mask": torch.ones_like(ids), **fields}
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: descant.generate(own, input_ids=ids, **extra),
        "theirs": lambda: model.generate(input_ids=ids, pad_token_id=0, **extra),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        outputs = {}
        for name, call in calls.items():
            torch.manual_seed(0)
            begin = time.process_time()
            outputs[name] = call()
            seconds[name].append(time.process_time() - begin)
        same = bool((outputs["ours"][:, : ids.shape[1] + new] == outputs["theirs"]).all())
        print(f"  { ({name: round(some[-1], 1) for name, some in seconds.items()}) } s, same tokens: {same}")
    return statistics.median(seconds["theirs"]) / statistics.median(seconds["ours"])


def _random_prompt(model: Any, length: int) -> torch.Tensor:
    """A prompt of random tokens [1, L]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, model.config.vocab_size - 10, (1, length), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
