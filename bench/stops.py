"""`python -m bench.stops`: the cost of stop strings, setup and per step, ours and transformers'."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation import stopping_criteria as theirs

from descant.tokenization.stop_strings import StopStringMatcher

__all__ = ["main"]

MODELS = ("smollm2", "gemma3-270m")
STRINGS: Mapping[str, Sequence[str]] = {
    "short": ["stop"],
    "usual": ["\n\nHuman:", "</answer>"],
    "many": [f"{mark}{word}" for mark in ("\n", "### ") for word in ("User", "Human", "System", "Tool:")],
}
BATCHES = (1, 16, 256)
LENGTH = 64  # of the checked rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each model and set of strings; the exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.stops", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; may be repeated")
    parser.add_argument("--strings", action="append", choices=STRINGS, help="only these strings")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    steps = "".join(f"{f'us/step {batch}':>13}{'theirs':>8}" for batch in BATCHES)
    print(f"{'model':12}{'strings':8}{'cold ms':>9}{'warm ms':>9}{'theirs':>9}{'ratio':>7}{'warm':>7}{steps}")
    for name in options.model or MODELS:
        tokenizer = transformers.AutoTokenizer.from_pretrained(_folder(name))
        for kind in options.strings or STRINGS:
            print(*_line(name, tokenizer, kind, options.repeats), sep="", flush=True)
    return 0


def _folder(name: str) -> Path:
    folder = Path(os.environ.get("DESCANT_MODELS") or Path(__file__).resolve().parents[1] / "models") / name
    if not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
    return folder


def _line(name: str, tokenizer: Any, kind: str, repeats: int) -> Iterator[str]:
    strings = list(STRINGS[kind])
    warm = copy.copy(tokenizer)
    StopStringMatcher.from_tokenizer(warm, "warm")
    suffixes = iter(range(10**6))
    # A copy of a tokenizer and a new string are not cached.
    cold_time = _median(repeats, lambda: StopStringMatcher.from_tokenizer(copy.copy(tokenizer), strings))
    warm_time = _median(
        repeats,
        lambda: StopStringMatcher.from_tokenizer(warm, [*strings[1:], f"{strings[0]}{next(suffixes)}"]),
    )
    their_time = _median(max(1, repeats // 2), lambda: _theirs(tokenizer, strings))
    yield f"{name:12}{kind:8}{cold_time * 1e3:9.1f}{warm_time * 1e3:9.1f}{their_time * 1e3:9.0f}"
    yield f"{their_time / cold_time:7.1f}{their_time / warm_time:7.0f}"
    table, criterion = StopStringMatcher.from_tokenizer(warm, strings), _theirs(tokenizer, strings)
    for batch in BATCHES:
        ids = np.random.default_rng(0).integers(0, table.vocab_size, (batch, LENGTH))
        states, last, rows = table.state_after(ids[:, :-1]), ids[:, -1], torch.from_numpy(ids)
        ours = _seconds_per_run(
            lambda last=last, states=states: (table.matches[last, states], table.transition[last, states])
        )
        their_step = _seconds_per_run(lambda rows=rows: criterion(rows, None))
        yield f"{ours * 1e6:13.1f}{their_step * 1e6:8.0f}"


def _theirs(tokenizer: Any, strings: list[str]) -> Any:
    theirs.STOP_STRING_EMBEDDING_CACHE.clear()
    return theirs.StopStringCriteria(tokenizer, strings)


def _median(repeats: int, work: Callable[[], Any]) -> float:
    """Median CPU seconds."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def _seconds_per_run(work: Callable[[], Any], runs: int = 50) -> float:
    """CPU seconds per run, the best of five measurements."""
    times = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(runs):
            work()
        times.append(time.process_time() - start)
    return min(times) / runs


if __name__ == "__main__":
    sys.exit(main())
