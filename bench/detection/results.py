"""The figures of all tests: rates with their intervals."""

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
    """A rate with its 95 % interval, and its distance from the expected `level` in sigma."""
    low, high = proportion_interval(count, hits)
    out = {"hits": hits, "count": count, "rate": hits / count, "low": low, "high": high}
    if level is not None:
        out["sigma"] = (hits - level * count) / (level * (1.0 - level) * count) ** 0.5
    return out


def document(measures: Measures) -> dict[str, Any]:
    """All figures and the environment."""
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
    """The scores of a unit."""
    name = measures.name(stage, mark, batch)
    unit = next(one for one in measures.units() if one.name == name)
    stored = measures.library.store.get(name, unit.make)
    if stage == "edits":
        return {kind: [Score(*one) for one in tests] for kind, tests in stored.items()}
    found: dict[str, Any] = {}
    if "ids" in stored:
        found["ids"] = [[Score(*one) for one in test] for test in stored["ids"]]
    if "text" in stored:
        found["text"] = [Score(*one) for one in stored["text"]]
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
    """The number of texts of each kind."""
    counts: dict[str, dict[str, int]] = {}
    for one in measures.batches:
        kind = counts.setdefault(one.mark, {})
        name = f"{one.method}, {one.model}"
        kind[name] = kind.get(name, 0) + one.size
    return counts


def _false(mark: str, found: Tests) -> dict[str, Any]:
    """The false positive rates."""
    whole = [test[-1] for _, stored in found for test in stored["ids"]]
    rng = random.Random(f"{mark}/atoms")
    spread = [one.above + rng.random() * (one.p - one.above) for one in whole]
    human = [test[-1] for batch, stored in found if batch.method == HUMAN for test in stored["ids"]]
    read = [test for _, stored in found for test in stored["text"]]
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
    """The true positive rates at 1 % false positives."""
    found = [(one, _tests(measures, "true", mark, one)) for one in measures.of(mark, SAMPLED)]
    level = LEVELS[0]
    out: dict[str, Any] = {}
    for at, length in enumerate(LENGTHS):
        marked = [test[at] for _, stored in found for test in stored["ids"]]
        threshold = _quantile([test[at].p for _, stored in unmarked for test in stored["ids"]], level)
        out[str(length)] = {
            "z": statistics.median(one.z for one in marked),
            "p": _share(marked, level),
            "quantile": _share(marked, threshold),
        }
    read = [test for _, stored in found for test in stored["text"]]
    threshold = _quantile([test.p for _, stored in unmarked for test in stored["text"]], level)
    out["text"] = {
        "z": statistics.median(one.z for one in read),
        "p": _share(read, level),
        "quantile": _share(read, threshold),
    }
    out["models"] = {
        model: _by_length([stored for one, stored in found if one.model == model])
        for model in dict.fromkeys(one.model for one, _ in found)
    }
    return out


def _edits(measures: Measures, mark: str) -> dict[str, Any]:
    """The true positive rates after edits."""
    found = [_tests(measures, "edits", mark, one) for one in measures.of(mark, SAMPLED)]
    names = [f"{kind} {share}" for kind in KINDS for share in SHARES]
    return {
        name: _share(list(chain.from_iterable(stored[name] for stored in found)), LEVELS[0]) for name in names
    }


def _rows(measures: Measures, mark: str) -> dict[str, Any]:
    """The true positive rates by model and decoding method."""
    groups: dict[str, list[Any]] = {}
    kinds = {(one.model, one.method) for one in measures.of(mark) if one.method != SAMPLED}
    compared = {model for model, _ in kinds}
    for one in measures.of(mark):
        if one.model in compared:
            groups.setdefault(f"{one.model}, {one.method}", []).append(_tests(measures, "true", mark, one))
    return {name: _by_length(stored) for name, stored in groups.items()}


def _bayes(measures: Measures) -> dict[str, Any]:
    """SynthID's trained detector against the weighted mean."""
    unit = next(one for one in measures.units() if one.stage == "bayes")
    stored = measures.library.store.get(unit.name, unit.make)
    return {
        length: {name: rate(one["hits"], one["count"]) for name, one in detectors.items()}
        for length, detectors in stored.items()
    }


def _by_length(found: Sequence[Any]) -> dict[str, Any]:
    tests = [test for stored in found for test in stored["ids"]]
    whole = [test[-1] for test in tests]
    half = [test[0] for test in tests]
    return {
        "z": statistics.median(one.z for one in whole),
        "p": _share(whole, LEVELS[0]),
        "short": _share(half, LEVELS[0]),
    }


def _share(tests: Sequence[Score], threshold: float) -> dict[str, Any]:
    return rate(sum(one.p <= threshold for one in tests), len(tests))


def _quantile(p_values: Sequence[float], level: float) -> float:
    """The largest p-value at or below which at most `level` of these lie."""
    ordered = sorted(p_values)
    most = int(level * len(ordered))
    # Of equal values, all lie at or below it.
    below = [one for one in ordered[:most] if one < ordered[most]]
    return below[-1] if below else 0.0
