"""Results as a text table and as JSON."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers

import descant
from bench.compare import Result

__all__ = ["document", "head", "lines"]

_COLUMNS = (
    ("model", 8),
    ("case", 10),
    ("implementation", 14),
    ("x baseline", 10),
    ("quartiles", 12),
    ("best", 6),
    ("ms/step", 8),
    ("overhead ms", 11),
    ("speedup", 7),
    ("peak MB", 8),
    ("forwards", 9),
    ("fed", 6),
    ("tokens", 7),
)


def head() -> str:
    """The header line and a rule."""
    names = _row([name for name, _ in _COLUMNS])
    return f"{names}\n{'-' * len(names)}"


def lines(results: Sequence[Result]) -> Iterator[str]:
    """One line per result."""
    for one in results:
        yield _row(
            [
                one.model,
                one.case,
                one.implementation,
                f"{one.ratio:.3f}",
                f"{one.low:.2f}-{one.high:.2f}",
                f"{one.best:.3f}",
                f"{one.step:.2f}",
                f"{one.overhead:+.3f}",
                f"{one.speedup:.2f}",
                "-" if one.peak is None else f"{one.peak / 1e6:.1f}",
                str(one.forwards),
                str(one.fed),
                {True: "same", False: "OTHER", None: "-"}[one.same],
            ]
        )


def document(results: Sequence[Result]) -> str:
    """All results and the environment, as JSON."""
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "descant": descant.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    return json.dumps({"about": about, "results": [asdict(one) for one in results]}, indent=2) + "\n"


def _row(cells: Sequence[str]) -> str:
    parts = []
    for at, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True)):
        parts.append(cell.ljust(width) if at < 3 else cell.rjust(width))
    return " ".join(parts).rstrip()
