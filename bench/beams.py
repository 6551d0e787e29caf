"""`python -m bench.beams`: many rows of one prompt on the paged cache, beside transformers' own generate().

Beam search and `num_return_sequences` on a long prompt. Both ways take turns in one run; CPU time, one
thread, the median of each. What the cache copies is counted for several lengths of the prompt, and its
peak is compared with what one row of the prompt and a suffix a row would take.
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
from descant.kv_cache.paged import PagedStore

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "beams": lambda rows: {"num_beams": rows, "do_sample": False},
    "sequences": lambda rows: {"num_return_sequences": rows, "do_sample": True, "top_k": 50},
}


class Counted(NamedTuple):
    """What a run took of its cache."""

    moved: float  # slots copied a step
    peak: int  # bytes
    least: int  # bytes of one prompt and the suffix of every row


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.beams", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--beams", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", choices=tuple(CASES), action="append")
    parser.add_argument("--faster", type=float, default=2.0, help="the bar: so many times as fast")
    parser.add_argument("--larger", type=float, default=1.3, help="the bar: so many times the least memory")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    met = True
    for name in options.only or CASES:
        rows = getattr(options, name)
        fields = CASES[name](rows)
        ids = _text(model, options.prompt)
        for length in (options.prompt // 4, options.prompt // 2, options.prompt):
            seen = counted(model, ids[:, :length], options.new, rows, fields)
            ratio = seen.peak / seen.least
            print(
                f"{name} x {rows}, prompt {length}, {options.new} new: {seen.moved:.1f} slots copied a step, "
                f"peak {seen.peak / 2**20:.1f} MiB, {ratio:.2f} x one prompt and {rows} suffixes",
                flush=True,
            )
            met &= ratio <= options.larger
        ratio = raced(model, ids, options.new, fields, options.repeats)
        print(f"{name} x {rows}, prompt {options.prompt}: {ratio:.2f} x as fast as transformers", flush=True)
        met &= ratio >= options.faster
    return 0 if met else 1


def counted(model: Any, ids: torch.Tensor, new: int, rows: int, fields: dict[str, Any]) -> Counted:
    """What the cache copies and takes in one run."""
    cache = PagedStore()
    session = descant.Session(model, cache=cache)
    config = descant.GenerationConfig(max_new_tokens=new, min_new_tokens=new, **fields)
    session.admit(descant.Request(ids[0], config))
    peak = 0
    session.step()
    one = cache.nbytes // (-(-ids.shape[1] // cache.pool.block_size) * cache.pool.block_size)
    while len(session):
        session.step()
        peak = max(peak, cache.nbytes)
    # The last token is never read, so that a suffix has one position less.
    return Counted(cache.copied_slots / session.steps, peak, one * (ids.shape[1] + rows * (new - 1)))


def raced(model: Any, ids: torch.Tensor, new: int, fields: dict[str, Any], repeats: int) -> float:
    """How many times as fast as transformers' own generate() ours is, turn by turn."""
    extra = {"max_new_tokens": new, "min_new_tokens": new, "attention_mask": torch.ones_like(ids), **fields}
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: descant.generate(model, input_ids=ids, **extra),
        "theirs": lambda: model.generate(input_ids=ids, pad_token_id=0, **extra),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        said = {}
        for name, way in ways.items():
            torch.manual_seed(0)
            begin = time.process_time()
            said[name] = way()
            seconds[name].append(time.process_time() - begin)
        same = bool((said["ours"][:, : ids.shape[1] + new] == said["theirs"]).all())
        print(f"  { ({name: round(some[-1], 1) for name, some in seconds.items()}) } s, same tokens: {same}")
    return statistics.median(seconds["theirs"]) / statistics.median(seconds["ours"])


def _text(model: Any, length: int) -> torch.Tensor:
    """A prompt of tokens by chance, after a first one [1, L]."""
    chance = torch.Generator().manual_seed(1)
    return torch.randint(10, model.config.vocab_size - 10, (1, length), generator=chance)


if __name__ == "__main__":
    sys.exit(main())
