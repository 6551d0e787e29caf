"""The figures of a job's report: one pass over its results and errors, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["AdaptiveHistogram", "ErrorReason", "HistogramBar", "JobFigures", "collect_figures"]

SAMPLED_ROWS: Final = 10
SHOWN_REASONS: Final = 10
AGREEMENT_BARS: Final = 10
_MAX_BINS: Final = 4096
_MAX_REASONS: Final = 1000
_OTHER_REASONS: Final = "other reasons"
_BARS: Final = 24  # at most about so many in a picture
_LARGE, _LARGEST = 1e15, 1e300
_TAIL: Final = 0.005  # of the values, on each side, where a few far ones would squeeze all others


@dataclass(frozen=True)
class HistogramBar:
    """The number of values from `low` to below `high`; an infinite end collects what is beyond."""

    low: float
    high: float
    count: int


class AdaptiveHistogram:
    """Counts of values in fine bins, whose width is a power of ten and grows tenfold when there are too many.

    A wider bin is exactly ten bins, so the bins do not depend on the order of the values. Bars begin and end
    where bins do, so a value at the edge of a bar is in the right one.
    """

    def __init__(self, digits: int, max_bins: int = _MAX_BINS) -> None:
        self.count, self.total = 0, 0.0
        self._scale: int = 10**digits
        self._max_bins = max_bins
        self._width = 1  # of a bin, in units of 10 ** -digits
        self._bins: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a finite value."""
        self.count += 1
        self.total += value
        value = min(max(value, -_LARGEST), _LARGEST)
        # The product of a large value could be infinite, and has no digits to round.
        scaled = round(value * self._scale) if abs(value) < _LARGE else int(value) * self._scale
        self._bins[scaled // self._width] += 1
        while len(self._bins) > self._max_bins:
            wider: Counter[int] = Counter()
            for index, count in self._bins.items():
                wider[index // 10] += count
            self._bins, self._width = wider, 10 * self._width

    @property
    def mean(self) -> float:
        """The mean of the values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that a share of the values does not exceed, to the width of a bin."""
        return self._value(self._quantile_bin(share))

    def bars(self) -> list[HistogramBar]:
        """The values in bars of a width of 1, 2 or 5 times a power of ten, from the lowest to the highest."""
        if not self.count:
            return []
        low, high = self._bar_range()
        # Equal values have a bar of 1 or 0.1, and not of a fine bin.
        least = (high - low) / _BARS if high > low else max(self._scale // 10, 1) / self._width
        width = _nice_width(least)
        first, last = low // width, high // width
        counts: Counter[int] = Counter()
        for index, count in self._bins.items():
            counts[min(max(index // width, first - 1), last + 1)] += count
        edges = [self._value(at * width) for at in range(first, last + 2)]
        bars = [HistogramBar(edges[at], edges[at + 1], counts[first + at]) for at in range(last - first + 1)]
        if counts[first - 1]:
            bars.insert(0, HistogramBar(-math.inf, edges[0], counts[first - 1]))
        if counts[last + 1]:
            bars.append(HistogramBar(edges[-1], math.inf, counts[last + 1]))
        return bars

    def _bar_range(self) -> tuple[int, int]:
        """The bins that the bars cover: all, or all but the tails where these are far away."""
        low, high = self._quantile_bin(_TAIL), self._quantile_bin(1 - _TAIL)
        lowest, highest, margin = min(self._bins), max(self._bins), 3 * (high - low)
        if not margin:
            return lowest, highest
        return (low if lowest < low - margin else lowest, high if highest > high + margin else highest)

    def _quantile_bin(self, share: float) -> int:
        left = max(1, math.ceil(share * self.count))
        for index, count in sorted(self._bins.items()):
            left -= count
            if left <= 0:
                return index
        return max(self._bins, default=0)

    def _value(self, index: int) -> float:
        """Where a bin begins."""
        return index * self._width / self._scale


@dataclass
class ErrorReason:
    """Rows that failed for one reason, and the first of them."""

    count: int
    row: Any
    message: str


@dataclass
class JobFigures:
    """What the results and errors of a job amount to."""

    results: int = 0
    failed: int = 0
    completions: int = 0
    tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    lengths: AdaptiveHistogram = field(default_factory=lambda: AdaptiveHistogram(0))
    scores: AdaptiveHistogram = field(default_factory=lambda: AdaptiveHistogram(6))
    voted: int = 0  # rows whose answer is that of a vote
    agreement: list[int] = field(default_factory=lambda: [0] * AGREEMENT_BARS)  # by the share of the samples
    total_agreement: float = 0.0
    unanimous: int = 0  # rows whose votes agree
    unanswered: int = 0  # rows without an answer
    reasons: dict[str, ErrorReason] = field(default_factory=dict)
    sample: list[Mapping[str, Any]] = field(default_factory=list)

    def add_result(self, record: Mapping[str, Any]) -> None:
        """Count a result."""
        self.results += 1
        if len(self.sample) < SAMPLED_ROWS:
            self.sample.append(record)
        for one in record["completions"]:
            self.completions += 1
            self.tokens += one["tokens"]
            self.finish_reasons[str(one["finish_reason"])] += 1
            self.lengths.add(one["tokens"])
        best: Mapping[str, Any] = next(iter(record["completions"]), {})
        score = best.get("score")
        if score is None:
            return
        if "votes" in best:
            self.voted += 1
            self.agreement[min(int(score * AGREEMENT_BARS + 1e-6), AGREEMENT_BARS - 1)] += 1
            self.total_agreement += score
            self.unanimous += score == 1.0
            self.unanswered += best.get("answer") is None
        else:
            self.scores.add(score)

    @property
    def mean_agreement(self) -> float:
        """The mean share of the samples that have their row's answer; 0 if there was no vote."""
        return self.total_agreement / self.voted if self.voted else 0.0

    def agreement_bars(self) -> list[HistogramBar]:
        """The rows by the share of the samples that have their answer; the last bar includes all samples."""
        size = AGREEMENT_BARS
        return [HistogramBar(at / size, (at + 1) / size, count) for at, count in enumerate(self.agreement)]

    def add_error(self, record: Mapping[str, Any]) -> None:
        """Count a row without a result; errors that differ only in the value they got have one reason."""
        self.failed += 1
        message = str(record["error"])
        reason = message.partition(", got ")[0]
        if reason not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            reason = _OTHER_REASONS
        found = self.reasons.setdefault(reason, ErrorReason(0, record.get("id", record["row"]), message))
        found.count += 1

    def top_reasons(self) -> list[tuple[str, ErrorReason]]:
        """The most frequent reasons; of equally frequent ones that of the earlier row comes first."""
        return sorted(self.reasons.items(), key=lambda item: -item[1].count)[:SHOWN_REASONS]


def collect_figures(results: Iterable[Mapping[str, Any]], errors: Iterable[Mapping[str, Any]]) -> JobFigures:
    """The figures of a job's results and errors, each read once."""
    figures = JobFigures()
    for record in results:
        figures.add_result(record)
    for record in errors:
        figures.add_error(record)
    return figures


def _nice_width(least: float) -> int:
    """The smallest 1, 2 or 5 times a power of ten that is at least so large."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
