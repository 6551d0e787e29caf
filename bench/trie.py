"""`python -m bench.trie`: the cost of allowed sequences in a wide beam search, against no restriction."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

import descant
from bench.forward_counter import ForwardCounter
from descant.decoding.processors.allowed_sequences import AllowedSequences

__all__ = ["main"]

Array = np.ndarray[Any, np.dtype[Any]]
PROMPT = [1, 9038, 2501, 263, 931]  # "Once upon a time"
EOS = 2
MOST = 1.3  # times the plain search
KINDS = ("plain", "trie")


class _Run(NamedTuple):
    """One search: its CPU seconds, its output, its forwards and input positions."""

    seconds: float
    sequences: Tensor  # [beams, length + 1]
    forwards: int
    fed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the cost of both searches; exit status 1 if the trie is too slow or an output is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m bench.trie", description=__doc__)
    parser.add_argument("--beams", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=8, help="tokens of a sequence")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--most", type=float, default=MOST, help="allowed ratio")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = _model("stories15m")
    rng, size = np.random.default_rng(0), model.config.vocab_size
    sequences = rng.integers(EOS + 1, size, (options.sequences, options.length), dtype=np.int32)
    start = time.process_time()
    trie = AllowedSequences(sequences, EOS)
    seconds = time.process_time() - start
    print(f"compiled {len(trie):,} sequences in {seconds:.2f} s of CPU, {trie.nbytes / 1e6:.1f} MB")
    ratio, legal = _compare(model, trie, sequences, options)
    return 0 if legal and ratio <= options.most else 1


def _model(name: str) -> Any:
    folder = Path(os.environ.get("DESCANT_MODELS") or Path(__file__).resolve().parents[1] / "models") / name
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model in {folder}: build it with `python tools/models.py {name}`")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _compare(
    model: Any, trie: AllowedSequences, sequences: Array, options: argparse.Namespace
) -> tuple[float, bool]:
    """Print a line for each search, run in turn; the ratio of times, and whether all outputs are legal."""
    runs: dict[str, list[_Run]] = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats + 1):  # the first of each warms up
        for kind in KINDS if repeat % 2 else KINDS[::-1]:
            run = _search(model, trie if kind == "trie" else None, options.beams, options.length + 1)
            runs[kind] += [run] if repeat else []
    medians = {kind: statistics.median(run.seconds for run in runs[kind]) for kind in KINDS}
    ratio = medians["trie"] / medians["plain"]
    print(f"{'':8}{'CPU s':>8}{'ratio':>8}{'forwards':>10}{'fed':>8}{'legal':>8}{'of':>6}")
    counts = {}
    for kind in KINDS:
        last = runs[kind][-1]
        counts[kind] = _count_legal(last.sequences, sequences)
        shown = f"{medians[kind]:8.3f}{medians[kind] / medians['plain']:8.3f}{last.forwards:10}{last.fed:8}"
        print(f"{kind:8}{shown}{counts[kind]:8}{len(last.sequences):6}", flush=True)
    return ratio, counts["trie"] == len(runs["trie"][-1].sequences)


def _search(model: Any, trie: AllowedSequences | None, beams: int, new: int) -> _Run:
    """One search that returns every beam."""
    gc.collect()
    with ForwardCounter(model) as counter:
        start = time.process_time()
        found = descant.generate(
            model,
            input_ids=torch.tensor([PROMPT]),
            prefix_allowed_tokens_fn=trie,
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=new,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        seconds = time.process_time() - start
    return _Run(seconds, found[:, len(PROMPT) :], counter.forwards, counter.fed)


def _count_legal(found: Tensor, sequences: Array) -> int:
    """The number of distinct outputs that are an allowed sequence with its end token."""
    legal = set()
    for one in found.tolist():
        *tokens, end = one
        if end == EOS and len(tokens) == sequences.shape[1]:
            candidates = sequences[sequences[:, 0] == tokens[0]]
            if (candidates == np.array(tokens)).all(1).any():
                legal.add(tuple(tokens))
    return len(legal)


if __name__ == "__main__":
    sys.exit(main())
