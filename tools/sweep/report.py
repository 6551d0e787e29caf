"""The results of a sweep: as JSON, and as a Markdown page."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.sweep.catalogue import TASKS

__all__ = ["PAGE", "RESULTS", "document", "page", "reduced_document"]

_STATUS = {
    "works": "greedy and beam-4 tokens and greedy logits equal transformers', and batches equal single rows",
    "refused": "Descant raises an error that gives the reason",
    "differs": "a check failed",
    "fails": "Descant raised an unexpected error",
    "not tried": "transformers' own generate() does not run the tiny model",
}
_TITLES = {
    "causal-lm": "Causal language models",
    "seq2seq-lm": "Encoder-decoders",
    "image-text-to-text": "Images and text",
    "vision2seq": "Images to text",
    "speech-seq2seq": "Speech",
    "text-to-audio": "Text to audio",
    "multimodal-lm": "Audio and text",
}


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "sweep" / "results.json"
PAGE = ROOT / "docs" / "reference" / "models.md"

_HEAD = """<!-- Written by `python -m tools.sweep.report --keep` from results.json: edit there. -->

# Models

Every generative class that the auto mappings of transformers {transformers} list, each as a tiny random
model in float32, decoded by transformers' own `generate()` and by Descant: three prompts of different lengths
one by one, then as a batch, greedily and with four beams. `python -m tools.sweep` repeats the comparison. The
traits of a class decide its inputs; see [Models: text, images, sound](../guide/models.md).

"""
_KEPT = ("task", "model_type", "name", "status", "reason", "note", "beam", "reference_beam", "cpu")


def reduced_document(data: dict[str, Any]) -> str:
    """A JSON document reduced to the fields of the report, one line per class."""
    lines = [
        json.dumps({name: record[name] for name in _KEPT if name in record}) for record in data["results"]
    ]
    versions = json.dumps(data["versions"])
    return f'{{"versions": {versions}, "results": [\n' + ",\n".join(lines) + "\n]}\n"


def document(records: Sequence[dict[str, Any]]) -> str:
    """Records as a JSON document, with the library versions."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return json.dumps({"versions": versions, "results": list(records)}, indent=1) + "\n"


def page(data: dict[str, Any]) -> str:
    """A Markdown page of a JSON document: the counts, then a table for each task."""
    records = data["results"]
    parts = [_HEAD.format(**data["versions"]) + _counts(records)]
    for task in TASKS:
        some = [record for record in records if record["task"] == task]
        if some:
            parts.append(f"## {_TITLES[task]}\n\n{_table(some)}")
    return "\n\n".join(parts) + "\n"


def _counts(records: Sequence[dict[str, Any]]) -> str:
    tasks = [task for task in TASKS if any(record["task"] == task for record in records)]
    counts = Counter((record["status"], record["task"]) for record in records)
    found = [status for status in _STATUS if any(record["status"] == status for record in records)]
    head = ["", *(_TITLES[task] for task in tasks), "all", "meaning"]
    rows = []
    for status in found:
        numbers = [counts[status, task] for task in tasks]
        rows.append([status, *map(str, numbers), str(sum(numbers)), _STATUS[status]])
    return _grid(head, rows)


def _table(records: Iterable[dict[str, Any]]) -> str:
    rows = [
        [f"`{record['name']}`", f"`{record['model_type']}`", record["status"], _remark(record)]
        for record in records
    ]
    return _grid(["class", "model type", "result", "remark"], rows)


def _remark(record: dict[str, Any]) -> str:
    parts = [record["reason"], record["note"]]
    if record["reference_beam"]:
        parts.append(f"transformers' own beam search fails with a cache ({record['reference_beam']})")
    elif record["beam"] == "compared without a cache":
        parts.append("transformers' own beam search gives other tokens with its cache than without")
    if record["status"] == "works" and record["beam"] == "not compared":
        parts.append("greedy only")
    elif record["beam"] == "compared without a cache":
        parts.append("compared with its search without one")
    return "; ".join(part for part in parts if part)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text escaped for a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(argv: Sequence[str] | None = None) -> int:
    """Turn a JSON document into a page: `python -m tools.sweep.report results.json`; `--keep` keeps both."""
    parser = argparse.ArgumentParser(prog="python -m tools.sweep.report", description=main.__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--keep", action="store_true", help="write the project's own data and page")
    options = parser.parse_args(argv)
    data = json.loads(options.results.read_text(encoding="utf-8"))
    if options.keep:
        RESULTS.write_text(reduced_document(data), encoding="utf-8")
        PAGE.write_text(page(data), encoding="utf-8")
    else:
        sys.stdout.write(page(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
