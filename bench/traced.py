"""`python -m bench.traced`: the cost of tracing, and the size of a long trace.

Each round decodes greedily without a trace, with one, and without one again. "noise" is the second run
without / the first, "traced" the run with a trace / the mean of both. CPU seconds of whole calls, one thread;
ratios of medians.
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
from bench.scenarios import load_model
from descant.trace.records import to_json_line

__all__ = ["main"]

PROMPT = 32  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios; the exit status says whether the limits are met."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load_model(options.model)
    has_tokenizer = (options.model / "tokenizer_config.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model) if has_tokenizer else None
    generator = torch.Generator().manual_seed(0)
    high = model.config.vocab_size
    prompt = torch.randint(min(100, high // 2), high, (1, PROMPT), generator=generator)
    times: list[list[float]] = [[], [], []]
    for repeat in range(-1, options.repeats):  # the first warms up
        for run, trace in enumerate((None, True, None)):
            start = time.process_time()
            _generate(model, prompt, tokenizer, options.new, trace)
            if repeat >= 0:
                times[run].append(time.process_time() - start)
    first, on, second = (statistics.median(some) / options.new for some in times)
    ratio = 2 * on / (first + second)
    print(f"{options.model.name}, greedy, {options.new} new tokens, median of {options.repeats}")
    print(f"{'off ms':>9}{'traced ms':>11}{'off ms':>9}{'noise':>8}{'traced':>8}")
    steps = f"{first * 1e3:9.2f}{on * 1e3:11.2f}{second * 1e3:9.2f}"
    print(f"{steps}{second / first:8.3f}{ratio:8.3f}", flush=True)
    passed = ratio <= options.most
    if options.long:
        passed &= _check_long_run(model, prompt, tokenizer, options.long)
    print("all limits are met" if passed else "A LIMIT IS MISSED", flush=True)
    return 0 if passed else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.traced", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--new", type=int, default=64, help="new tokens of each timed call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--long", type=int, default=2000, help="steps of the long run; 0: none")
    parser.add_argument("--most", type=float, default=1.2, help="allowed ratio of tracing to no tracing")
    return parser.parse_args(argv)


def _generate(model: Any, prompt: torch.Tensor, tokenizer: Any, new: int, trace: bool | None) -> Any:
    ends = {"eos_token_id": None, "pad_token_id": 0}  # never stop
    return descant.generate(model, prompt, max_new_tokens=new, tokenizer=tokenizer, trace=trace, **ends)


def _check_long_run(model: Any, prompt: torch.Tensor, tokenizer: Any, steps: int) -> bool:
    """Measure a long run; whether its trace is complete and within its limit."""
    trace = _generate(model, prompt, tokenizer, steps, True).trace
    size = sum(len(to_json_line(one)) + 1 for one in trace.records)
    complete = len(trace.steps) == steps and not trace.truncations
    print(f"{steps} steps: {size} bytes of {trace.header.limit}, {'whole' if complete else 'cut'}")
    return complete and size <= trace.header.limit


if __name__ == "__main__":
    sys.exit(main())
