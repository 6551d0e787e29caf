"""`python -m bench.traced`: what recording a run costs, and how many bytes a long one comes to.

Each round decodes greedily without a trace, with one, and without one again: "noise" is the second run
without over the first, "traced" the run with a trace over the mean of both. CPU seconds of whole calls, one
thread; ratios are of medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import descant
from bench.scenarios import loaded
from descant.trace.records import to_json_line

__all__ = ["main"]

PROMPT = 32  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios; the process's exit status says whether the bars hold."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = loaded(options.model)
    written = (options.model / "tokenizer_config.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model) if written else None
    generator = torch.Generator().manual_seed(0)
    high = model.config.vocab_size
    prompt = torch.randint(min(100, high // 2), high, (1, PROMPT), generator=generator)
    times: list[list[float]] = [[], [], []]
    for repeat in range(-1, options.repeats):  # the first warms up
        for way, trace in enumerate((None, True, None)):
            began = time.process_time()
            _generated(model, prompt, tokenizer, options.new, trace)
            if repeat >= 0:
                times[way].append(time.process_time() - began)
    first, on, second = (statistics.median(some) / options.new for some in times)
    share = 2 * on / (first + second)
    print(f"{options.model.name}, greedy, {options.new} new tokens, median of {options.repeats}")
    print(f"{'off ms':>9}{'traced ms':>11}{'off ms':>9}{'noise':>8}{'traced':>8}")
    steps = f"{first * 1e3:9.2f}{on * 1e3:11.2f}{second * 1e3:9.2f}"
    print(f"{steps}{second / first:8.3f}{share:8.3f}", flush=True)
    held = share <= options.most
    if options.long:
        held &= _long(model, prompt, tokenizer, options.long)
    print("the bars hold" if held else "A BAR IS MISSED", flush=True)
    return 0 if held else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.traced", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--new", type=int, default=64, help="tokens of each call that is timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--long", type=int, default=2000, help="steps of the run that is weighed; 0: none")
    parser.add_argument("--most", type=float, default=1.2, help="what tracing may take, over not tracing")
    return parser.parse_args(argv)


def _generated(model: Any, prompt: torch.Tensor, tokenizer: Any, new: int, trace: bool | None) -> Any:
    ends = {"eos_token_id": None, "pad_token_id": 0}  # never
    return descant.generate(model, prompt, max_new_tokens=new, tokenizer=tokenizer, trace=trace, **ends)


def _long(model: Any, prompt: torch.Tensor, tokenizer: Any, steps: int) -> bool:
    """Weigh a long run; whether it is whole and within its limit."""
    trace = _generated(model, prompt, tokenizer, steps, True).trace
    size = sum(len(to_json_line(one)) + 1 for one in trace.records)
    whole = len(trace.steps) == steps and not trace.truncations
    print(f"{steps} steps: {size} bytes of {trace.header.limit}, {'whole' if whole else 'cut'}")
    return whole and size <= trace.header.limit


if __name__ == "__main__":
    sys.exit(main())
