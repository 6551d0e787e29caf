"""`python -m bench.detection`: error rates of the watermark detectors, by edit and by decoding method.

Finished units are stored in a folder, so that an interrupted run continues, and several processes can share
the work. The figures are written to a JSON file, from which `tools/docs/watermark_tables.py` writes the
tables of the guide.
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
    """Compute the missing units, then write the figures; the exit status of the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.detection", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small sample, on the small models")
    parser.add_argument("--keys", type=int, help="random keys per unmarked text")
    parser.add_argument("--stage", choices=STAGES, nargs="*", help="only these stages; writes no figures")
    parser.add_argument("--mark", choices=("none", *MARKS), nargs="*", help="only these; writes no figures")
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--folder", type=Path, help="folder of finished units (build/detection)")
    parser.add_argument("--out", type=Path, help="file of the figures (bench/results/detection.json)")
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
    for one in units:  # skip the units of other processes
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
