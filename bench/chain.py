"""`python -m bench.chain`: what a chain of processors costs, beside transformers' own on the same scores."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from descant.core.context import Context, columns_from_rows
from descant.decoding import processors as ours

__all__ = ["main"]

ASKED = {"repetition_penalty": 1.1, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
LENGTH = 200  # tokens of each row
KINDS = (
    "RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each processor and for the chain; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.chain", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=7, help="how often each way runs, timed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(options.rows, options.vocabulary, generator=generator) * 3
    ids = torch.randint(options.vocabulary, (options.rows, LENGTH), generator=generator)
    mine, other = _ours(ids), _theirs(ids)
    print(f"{'':34}{'ours ms':>9}{'theirs':>9}{'gain':>7}  scores")
    for place, name in enumerate(KINDS):
        _raced(name, [mine[place]], [other[place]], scores, options.repeats)
        scores = mine[place](scores)  # each is timed on what the one before leaves
    scores = torch.randn(options.rows, options.vocabulary, generator=generator) * 3
    _raced("chain", mine, other, scores, options.repeats)
    return 0


Link = Callable[[Tensor], Tensor]


def _ours(ids: Tensor) -> list[Link]:
    """Our processors with a column of parameters, as the loop calls them."""
    row = {
        "repetition_penalty": ASKED["repetition_penalty"],
        "temperature": ASKED["temperature"],
        "top_k": ASKED["top_k"],
        "tail_mass": 1.0 - ASKED["top_p"],
        "min_tokens_to_keep": 1,
    }
    length = torch.full((len(ids),), ids.shape[1])
    context = Context(ids, length, torch.zeros_like(length), columns_from_rows([row] * len(ids)))
    made = [getattr(ours, name).make_unbound() for name in KINDS]
    return [lambda scores, one=one: one.process(context, scores) for one in made]


def _theirs(ids: Tensor) -> list[Link]:
    made = [getattr(theirs, name)(value) for name, value in zip(KINDS, ASKED.values(), strict=True)]
    return [lambda scores, one=one: one(ids, scores) for one in made]


def _raced(name: str, mine: Sequence[Link], other: Sequence[Link], scores: Tensor, repeats: int) -> None:
    """Print the median CPU times of both, run in turn, and whether their answers are the same."""
    times: tuple[list[float], list[float]] = ([], [])
    found = [scores, scores]
    for repeat in range(repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            start, answer = time.process_time(), scores
            for link in (mine, other)[which]:
                answer = link(answer)
            times[which].append(time.process_time() - start)
            found[which] = answer
    first, second = (statistics.median(part) * 1e3 for part in times)
    same = "same" if torch.equal(*found) else "OTHER"
    print(f"{name:34}{first:9.1f}{second:9.1f}{second / first:7.2f}  {same}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
