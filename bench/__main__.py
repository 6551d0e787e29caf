"""`python -m bench`: a table of decoding implementations, measured in this process on one thread."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from bench import compare, table
from bench.case import CASES, Case
from bench.models import SUBJECTS, Subject

__all__ = ["main"]

# The short run of CI: all cases on the tiny model, one on the real model.
_QUICK = {"tiny": tuple(CASES), "smollm2": ("greedy-1",)}
_QUICK_REPEATS = {"tiny": 5, "smollm2": 2}
_QUICK_NEW = {"tiny": 20, "smollm2": 8}


@dataclass(frozen=True)
class _Plan:
    """A model and the cases to run on it."""

    subject: Subject
    cases: Sequence[Case]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected cases, print each result; the exit status of the process."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: list[compare.Result] = []
    print(table.head(), flush=True)
    for plan in _selected_plans(options):
        model = plan.subject.model()
        for case in plan.cases:
            case_results = compare.run(model, plan.subject.name, case, plan.subject.new, plan.subject.repeats)
            print(*table.lines(case_results), sep="\n", flush=True)
            results += case_results
    if options.json is not None:
        options.json.write_text(table.document(results), encoding="utf-8")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--model", action="append", choices=SUBJECTS, help="only this model; may be repeated")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case; may be repeated")
    parser.add_argument("--repeats", type=_positive, help="timed runs of each implementation")
    parser.add_argument("--quick", action="store_true", help="few repeats and tokens, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


def _selected_plans(options: argparse.Namespace) -> Iterator[_Plan]:
    for name, subject in SUBJECTS.items():
        if options.model and name not in options.model:
            continue
        names = options.case or (_QUICK[name] if options.quick else tuple(CASES))
        if options.quick:
            subject = replace(subject, new=_QUICK_NEW[name], repeats=_QUICK_REPEATS[name])
        if options.repeats:
            subject = replace(subject, repeats=options.repeats)
        yield _Plan(subject, [CASES[one] for one in names])


if __name__ == "__main__":
    sys.exit(main())
