"""`python -m bench.chain`: the cost of a processor chain, ours and transformers', on the same scores."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

import descant as ours
from descant.core.context import Context, columns_from_rows

__all__ = ["main"]

PARAMETERS = {"repetition_penalty": 1.1, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
LENGTH = 200  # tokens of each row
KINDS = (
    "RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each processor and for the chain; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.chain", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(options.rows, options.vocabulary, generator=generator) * 3
    ids = torch.randint(options.vocabulary, (options.rows, LENGTH), generator=generator)
    our_chain, their_chain = _ours(ids), _theirs(ids)
    print(f"{'':34}{'ours ms':>9}{'theirs':>9}{'ratio':>7}  scores")
    for place, name in enumerate(KINDS):
        _compare(name, [our_chain[place]], [their_chain[place]], scores, options.repeats)
        scores = our_chain[place](scores)  # each is timed on the output of the one before
    scores = torch.randn(options.rows, options.vocabulary, generator=generator) * 3
    _compare("chain", our_chain, their_chain, scores, options.repeats)
    return 0


ProcessorCall = Callable[[Tensor], Tensor]


def _ours(ids: Tensor) -> list[ProcessorCall]:
    """Our processors with parameter columns, as the loop calls them."""
    row = {
        "repetition_penalty": PARAMETERS["repetition_penalty"],
        "temperature": PARAMETERS["temperature"],
        "top_k": PARAMETERS["top_k"],
        "tail_mass": 1.0 - PARAMETERS["top_p"],
        "min_tokens_to_keep": 1,
    }
    length = torch.full((len(ids),), ids.shape[1])
    context = Context(ids, length, torch.zeros_like(length), columns_from_rows([row] * len(ids)))
    instances = [getattr(ours, name).make_unbound() for name in KINDS]
    return [lambda scores, one=one: one.process(context, scores) for one in instances]


def _theirs(ids: Tensor) -> list[ProcessorCall]:
    instances = [getattr(theirs, name)(value) for name, value in zip(KINDS, PARAMETERS.values(), strict=True)]
    return [lambda scores, one=one: one(ids, scores) for one in instances]


def _compare(
    name: str,
    our_chain: Sequence[ProcessorCall],
    their_chain: Sequence[ProcessorCall],
    scores: Tensor,
    repeats: int,
) -> None:
    """Print the median CPU times of both, run in turn, and whether their outputs are equal."""
    times: tuple[list[float], list[float]] = ([], [])
    outputs = [scores, scores]
    for repeat in range(repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            start, output = time.process_time(), scores
            for processor in (our_chain, their_chain)[which]:
                output = processor(output)
            times[which].append(time.process_time() - start)
            outputs[which] = output
    first, second = (statistics.median(part) * 1e3 for part in times)
    same = "same" if torch.equal(*outputs) else "OTHER"
    print(f"{name:34}{first:9.1f}{second:9.1f}{second / first:7.2f}  {same}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
