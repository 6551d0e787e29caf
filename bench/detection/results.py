"""What all tests come to: rates with their intervals."""

from __future__ import annotations

import datetime
import platform
import random
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import transformers

import descant
from bench.detection.edits import KINDS, SHARES
from bench.detection.marks import MARKS
from bench.detection.measures import LENGTHS, Measures
from bench.detection.texts import HUMAN, NONE, SAMPLED, Batch
from bench.detection.trial import Score
from descant.decoding.watermark.statistics import proportion_interval

__all__ = ["LEVELS", "document", "rate"]

LEVELS = (0.01, 0.001)


def rate(hits: int, count: int, level: float | None = None) -> dict[str, Any]:
    """A share with its 95 % interval, and how many sigma it lies from the `level` it should have."""
    low, high = proportion_interval(count, hits)
    out = {"hits": hits, "count": count, "rate": hits / count, "low": low, "high": high}
    if level is not None:
        out["sigma"] = (hits - level * count) / (level * (1.0 - level) * count) ** 0.5
    return out


def document(measures: Measures) -> dict[str, Any]:
    """All figures, and where they come from."""
    unmarked = {
        mark: [
            (one, {**_tests(measures, "false", mark, one), **_tests(measures, "alone", mark, one)})
            for one in measures.of(NONE)
        ]
        for mark in MARKS
    }
    return {
        "about": _about(),
        "texts": _texts(measures),
        "false": {mark: _false(mark, found) for mark, found in unmarked.items()},
        "true": {mark: _true(measures, mark, unmarked[mark]) for mark in MARKS},
        "edits": {mark: _edits(measures, mark) for mark in MARKS},
        "rows": {mark: _rows(measures, mark) for mark in MARKS},
        "bayes": _bayes(measures),
    }


Tests = Sequence[tuple[Batch, Any]]


def _tests(measures: Measures, stage: str, mark: str, batch: Batch) -> Any:
    """What a unit holds, its tests as scores."""
    name = measures.name(stage, mark, batch)
    unit = next(one for one in measures.units() if one.name == name)
    held = measures.library.store.get(name, unit.make)
    if stage == "edits":
        return {kind: [Score(*one) for one in tests] for kind, tests in held.items()}
    found: dict[str, Any] = {}
    if "ids" in held:
        found["ids"] = [[Score(*one) for one in test] for test in held["ids"]]
    if "text" in held:
        found["text"] = [Score(*one) for one in held["text"]]
    return found


def _about() -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "descant": descant.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _texts(measures: Measures) -> dict[str, Any]:
    """How many texts there are of each kind."""
    counts: dict[str, dict[str, int]] = {}
    for one in measures.batches:
        kind = counts.setdefault(one.mark, {})
        name = f"{one.way}, {one.model}"
        kind[name] = kind.get(name, 0) + one.size
    return counts


def _false(mark: str, found: Tests) -> dict[str, Any]:
    """Unmarked texts that are called marked."""
    whole = [test[-1] for _, held in found for test in held["ids"]]
    chance = random.Random(f"{mark}/atoms")
    spread = [one.above + chance.random() * (one.p - one.above) for one in whole]
    human = [test[-1] for batch, held in found if batch.way == HUMAN for test in held["ids"]]
    read = [test for _, held in found for test in held["text"]]
    return {
        "scored": statistics.median(one.scored for one in whole),
        **{
            str(level): {
                "exact": rate(sum(one.p <= level for one in whole), len(whole), level),
                "randomised": rate(sum(one <= level for one in spread), len(spread), level),
                "human": rate(sum(one.p <= level for one in human), len(human), level),
                "text": rate(sum(one.p <= level for one in read), len(read), level),
            }
            for level in LEVELS
        },
    }


def _true(measures: Measures, mark: str, unmarked: Tests) -> dict[str, Any]:
    """Marked texts that are called marked, at 1 % false positives."""
    found = [(one, _tests(measures, "true", mark, one)) for one in measures.of(mark, SAMPLED)]
    level = LEVELS[0]
    out: dict[str, Any] = {}
    for at, length in enumerate(LENGTHS):
        marked = [test[at] for _, held in found for test in held["ids"]]
        bar = _quantile([test[at].p for _, held in unmarked for test in held["ids"]], level)
        out[str(length)] = {
            "z": statistics.median(one.z for one in marked),
            "p": _share(marked, level),
            "quantile": _share(marked, bar),
        }
    read = [test for _, held in found for test in held["text"]]
    bar = _quantile([test.p for _, held in unmarked for test in held["text"]], level)
    out["text"] = {
        "z": statistics.median(one.z for one in read),
        "p": _share(read, level),
        "quantile": _share(read, bar),
    }
    out["models"] = {
        model: _ways([held for one, held in found if one.model == model])
        for model in dict.fromkeys(one.model for one, _ in found)
    }
    return out


def _edits(measures: Measures, mark: str) -> dict[str, Any]:
    """Marked texts that are called marked after somebody changed them."""
    found = [_tests(measures, "edits", mark, one) for one in measures.of(mark, SAMPLED)]
    names = [f"{kind} {share}" for kind in KINDS for share in SHARES]
    return {
        name: _share(list(chain.from_iterable(held[name] for held in found)), LEVELS[0]) for name in names
    }


def _rows(measures: Measures, mark: str) -> dict[str, Any]:
    """Marked texts by how they were decoded, model by model."""
    groups: dict[str, list[Any]] = {}
    kinds = {(one.model, one.way) for one in measures.of(mark) if one.way != SAMPLED}
    compared = {model for model, _ in kinds}
    for one in measures.of(mark):
        if one.model in compared:
            groups.setdefault(f"{one.model}, {one.way}", []).append(_tests(measures, "true", mark, one))
    return {name: _ways(held) for name, held in groups.items()}


def _bayes(measures: Measures) -> dict[str, Any]:
    """SynthID's trained detector beside the weighted mean."""
    unit = next(one for one in measures.units() if one.stage == "bayes")
    held = measures.library.store.get(unit.name, unit.make)
    return {
        length: {name: rate(one["hits"], one["count"]) for name, one in ways.items()}
        for length, ways in held.items()
    }


def _ways(found: Sequence[Any]) -> dict[str, Any]:
    tests = [test for held in found for test in held["ids"]]
    whole = [test[-1] for test in tests]
    half = [test[0] for test in tests]
    return {
        "z": statistics.median(one.z for one in whole),
        "p": _share(whole, LEVELS[0]),
        "short": _share(half, LEVELS[0]),
    }


def _share(tests: Sequence[Score], bar: float) -> dict[str, Any]:
    return rate(sum(one.p <= bar for one in tests), len(tests))


def _quantile(p_values: Sequence[float], level: float) -> float:
    """The largest p-value at or below which at most `level` of these lie."""
    ordered = sorted(p_values)
    most = int(level * len(ordered))
    # Where several are equal, all of them lie at or below it.
    below = [one for one in ordered[:most] if one < ordered[most]]
    return below[-1] if below else 0.0
