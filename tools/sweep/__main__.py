"""`python -m tools.sweep`: every generative architecture of transformers, decoded by it and by Descant."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.sweep.catalogue import TASKS, entries
from tools.sweep.process import Limits, each
from tools.sweep.report import document
from tools.sweep.subject import Entry
from tools.sweep.trial import trial

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected architectures, print each result; 0 if none differs or fails."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    chosen = _chosen(options)
    if options.list:
        _print_lines(*(" ".join(entry) for entry in chosen))
        return 0
    _warm()
    records = []
    for record in each(chosen, trial, options.jobs, Limits(seconds=options.seconds)):
        records.append(record)
        _print_lines(_line(record))
        if options.verbose and "traceback" in record:
            _print_lines(*(f"    {line}" for line in record["traceback"]))
    records.sort(key=lambda record: (TASKS.index(record["task"]), record["name"].lower()))
    if options.out is not None:
        options.out.write_text(document(records), encoding="utf-8")
    _print_lines(_summary(records))
    return int(any(record["status"] in ("differs", "fails") for record in records))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes or model types; all if not given")
    parser.add_argument("--task", nargs="+", choices=TASKS, help="only classes of these mappings")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--seconds", type=int, default=20, help="CPU time of each process (default 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="only classes that failed in these results"
    )
    parser.add_argument("--list", action="store_true", help="list the classes and exit")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace) -> list[Entry]:
    chosen = entries()
    if options.task:
        chosen = [entry for entry in chosen if entry.task in options.task]
    if options.only:
        known = {name for entry in chosen for name in (entry.name, entry.model_type)}
        unknown = [name for name in options.only if name not in known]
        if unknown:
            raise SystemExit(f"--only must name classes or model types that are listed, got {unknown[0]!r}")
        chosen = [entry for entry in chosen if {entry.name, entry.model_type} & set(options.only)]
    if options.again:
        records = json.loads(options.again.read_text(encoding="utf-8"))["results"]
        pending = {record["name"] for record in records if record["status"] != "works"}
        chosen = [entry for entry in chosen if entry.name in pending]
    return chosen


def _warm() -> None:
    """Import everything before forking, so that the processes share it."""
    trial(Entry("causal-lm", "llama", "LlamaForCausalLM"))


def _print_lines(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _line(record: dict[str, Any]) -> str:
    remark = record["reason"] or record["reference_beam"]
    line = f"{record['status']:9} {record.get('cpu', 0):6.2f} s  {record['name']}"
    return f"{line}: {remark}" if remark else line


def _summary(records: Sequence[dict[str, Any]]) -> str:
    counts = Counter(record["status"] for record in records)
    seconds = sum(record.get("cpu", 0.0) for record in records)
    shares = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{len(records)} architectures: {shares}; {seconds / 60:.1f} CPU-minutes"


if __name__ == "__main__":
    sys.exit(main())
