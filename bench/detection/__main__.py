"""`python -m bench.detection`: the error rates of the watermarks' detectors, their robustness, and rows.

What is done is kept in a folder, so a run that was stopped goes on where it was, and several can share the
work. In the end the figures stand in a JSON file, from which `tools/docs/watermark_tables.py` writes the
guide's tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from bench.detection.marks import MARKS
from bench.detection.measures import STAGES, Measures
from bench.detection.results import document
from bench.detection.store import Store
from bench.detection.texts import Library, batches

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is not done yet, then write the figures; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.detection", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a slice of everything, of the small models")
    parser.add_argument("--keys", type=int, help="random keys for each unmarked text")
    parser.add_argument("--stage", choices=STAGES, nargs="*", help="only these; no figures are written")
    parser.add_argument("--mark", choices=("none", *MARKS), nargs="*", help="only these, likewise")
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--folder", type=Path, help="where what is done is kept (build/detection)")
    parser.add_argument("--out", type=Path, help="where the figures go (bench/results/detection.json)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    quick = options.quick
    folder = options.folder or ROOT / "build" / ("detection-quick" if quick else "detection")
    library = Library(Store(folder), options.models)
    measures = Measures(library, list(batches(0.15 if quick else 1.0)), options.keys or (5 if quick else 25))
    units = [
        one
        for one in measures.units()
        if one.stage in (options.stage or STAGES) and (not options.mark or one.mark in options.mark)
    ]
    for one in units:  # what another process is at is left to it
        if library.store.free(one.name):
            library.store.get(one.name, one.make)
    for one in units:
        library.store.get(one.name, one.make)
    if options.stage or options.mark:
        return 0
    figures = json.dumps(document(measures), indent=1) + "\n"
    out = options.out or (folder / "figures.json" if quick else ROOT / "bench" / "results" / "detection.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(figures, encoding="utf-8")
    print(f"figures in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
