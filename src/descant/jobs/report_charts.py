"""The pictures of a job's report: small SVG charts that the page's style sheet colours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.sax.saxutils import escape

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.pictures.svg_elements import box, element, line, text, titled_group

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
        width = _round_spacing(1, least)
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
    """The figures of a job's results and errors."""

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
        for completion in record["completions"]:
            self.completions += 1
            self.tokens += completion["tokens"]
            self.finish_reasons[str(completion["finish_reason"])] += 1
            self.lengths.add(completion["tokens"])
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


# A picture is as wide as a phone, and grows with its card; text stays readable at either end.
WIDTH: Final = 400.0
LEFT, RIGHT, TOP, CHART_HEIGHT, BOTTOM = 36.0, 10.0, 22.0, 132.0, 24.0
MAX_STEP: Final = 56.0  # width of a bar and the gap beside it
_MIN_LABEL_GAP: Final = 46.0
_GRID_LINES: Final = 3
NUM_SHARE_COLOURS: Final = 6


@dataclass(frozen=True)
class ValueScale:
    """The form in which the values of a scale are written."""

    format_value: Callable[[float], str]
    is_whole: bool = False  # whole numbers: a bar from 5 to below 10 has those from 5 to 9

    def format_range(self, bar: HistogramBar) -> str:
        """The values of a bar."""
        if math.isinf(bar.low):
            return f"below {self.format_value(bar.high)}"
        if math.isinf(bar.high):
            return f"{self.format_value(bar.low)} and more"
        last = bar.high - 1 if self.is_whole else bar.high
        first, last_text = self.format_value(bar.low), self.format_value(last)
        return first if first == last_text else f"{first} to {last_text}"


def draw_histogram(
    bars: Sequence[HistogramBar],
    title: str,
    noun: str,
    scale: ValueScale,
    marks: Mapping[str, float],
) -> str:
    """Bars of counts of `noun` over a scale of values, with `marks` such as the median as vertical lines."""
    most = max(bar.count for bar in bars)
    step, start = _columns(len(bars))
    body = _draw_grid(most)
    for index, bar in enumerate(bars):
        height = _height(bar.count, most)
        x = start + index * step
        gap = min(2.0, step * 0.15)
        is_tail = math.isinf(bar.low) or math.isinf(bar.high)
        label = f"{scale.format_range(bar)}: {counted(bar.count, noun)}"
        shown = box(x + gap / 2, _BASE - height, step - gap, height, "tail" if is_tail else "column", rx=1.5)
        hover = element("rect", x=x, y=TOP, width=step, height=CHART_HEIGHT, class_="hover")
        body.append(titled_group(label, hover, shown if bar.count else "", data_count=bar.count))
    body += _draw_scale(bars, scale)
    for index, (name, value) in enumerate(marks.items()):
        body += _draw_mark(bars, scale, (name, value), index)
    return _picture(body, title, f"{counted(sum(bar.count for bar in bars), noun)}")


def draw_acceptance(drafted: Sequence[int], accepted: Sequence[int], title: str) -> str:
    """For each index of a draft the tokens that were fed, and how many of them were accepted."""
    most = max(drafted)
    step, start = _columns(len(drafted))
    body = _draw_grid(most)
    for index, (fed, taken) in enumerate(zip(drafted, accepted, strict=True)):
        x = start + index * step
        gap = min(6.0, step * 0.2)
        tall, full = _height(fed, most), _height(taken, most)
        parts = [
            box(x + gap / 2, _BASE - tall, step - gap, tall, "fed", rx=2) if fed else "",
            box(x + gap / 2, _BASE - full, step - gap, full, "good", rx=2) if taken else "",
        ]
        if step >= 30 and fed:
            rate = f"{100 * taken / fed:.0f} %"
            parts.append(text(rate, x + step / 2, _BASE - tall - 5, "tick strong", "middle"))
        if step >= 16:
            parts.append(text(str(index + 1), x + step / 2, _BASE + 16, "tick", "middle"))
        label = f"draft token {index + 1}: {taken:,} of {fed:,} accepted"
        body.append(titled_group(label, *parts, data_fed=fed, data_accepted=taken))
    return _picture(body, title, f"{sum(accepted)} of {sum(drafted)} draft tokens accepted")


def draw_shares(counts: Sequence[tuple[str, int]], title: str) -> str:
    """One bar of all counts, each with its share of the width."""
    total, x, body = sum(count for _, count in counts), 0.0, []
    for index, (name, count) in enumerate(counts):
        width = WIDTH * count / total
        label = f"{name}: {count:,} ({format_share(count, total)})"
        drawn = element("rect", x=x, y=0, width=width, height=16, class_=f"share{index % NUM_SHARE_COLOURS}")
        body.append(titled_group(label, drawn, data_count=count))
        x += width
    names = ", ".join(f"{name} {count}" for name, count in counts)
    return _picture(body, title, names, height=16.0, stretch=True)


def short_count(count: int) -> str:
    """A count of at most five characters, and a unit."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= (10**4 if unit == "k" else size):
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def format_share(count: int, total: int) -> str:
    """A share in per cent; a small one is not shown as none, nor almost all as all."""
    if not total:
        return "0 %"
    share = 100 * count / total
    if 0 < share < 0.1:
        return "< 0.1 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.1f}".removesuffix(".0") + " %"


# ------------------------------------------------------------------------ parts
_BASE: Final = TOP + CHART_HEIGHT


def _height(count: int, most: int) -> float:
    """The height of a bar; one that stands for anything is at least visible."""
    return max(CHART_HEIGHT * count / most, 1.5) if count else 0.0


def _columns(count: int) -> tuple[float, float]:
    """The width of each of so many bars, and where the first one begins: a few are in the middle."""
    room = WIDTH - LEFT - RIGHT
    step = min(MAX_STEP, room / count)
    return step, LEFT + (room - count * step) / 2


def _draw_grid(most: int) -> list[str]:
    """Horizontal lines at round counts, and the base line."""
    spacing = _round_spacing(_GRID_LINES + 1, most + 1)
    body = []
    for count in range(spacing, most + 1, spacing):
        y = _BASE - CHART_HEIGHT * count / most
        body.append(line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        body.append(text(short_count(count), LEFT - 6, y + 4, "tick", "end"))
    body.append(line(LEFT, _BASE, WIDTH - RIGHT, _BASE, "base"))
    return body


def _round_spacing(unit: float, least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50 and so on of which so many units are at least so much."""
    spacing = 1
    while spacing * unit < least:
        spacing = spacing * 5 // 2 if str(spacing)[0] == "2" else spacing * 2
    return spacing


def _draw_scale(bars: Sequence[HistogramBar], scale: ValueScale) -> list[str]:
    """The values of some edges, as many as have room; single numbers stand below the middle of their bar."""
    is_single = scale.is_whole and all(bar.high - bar.low in (1, math.inf) for bar in bars)
    step, start = _columns(len(bars))
    start += step / 2 if is_single else 0.0
    edges = [bar.low for bar in bars] + ([] if is_single else [bars[-1].high])
    every = _round_spacing(step, _MIN_LABEL_GAP)
    finite = [bar.high - bar.low for bar in bars if math.isfinite(bar.high - bar.low)]
    body = []
    for index, edge in enumerate(edges):
        # Labels are at multiples of their distance, so that they are round numbers.
        if math.isinf(edge) or (finite and round(edge / finite[0]) % every):
            continue
        x = start + index * step
        anchor = "start" if x < LEFT + 12 else "end" if x > WIDTH - 24 else "middle"
        body.append(line(x, _BASE, x, _BASE + 4, "base"))
        body.append(text(scale.format_value(edge), x, _BASE + 17, "tick", anchor))
    return body


def _draw_mark(
    bars: Sequence[HistogramBar], scale: ValueScale, mark: tuple[str, float], level: int
) -> list[str]:
    """A line at a value, named at its top; `level` keeps the names of several apart."""
    name, value = mark
    step, start = _columns(len(bars))
    for index, bar in enumerate(bars):
        if bar.low <= value < bar.high:
            inside = 0.5
            if math.isfinite(bar.low) and math.isfinite(bar.high):
                # The middle of a whole number's part of the bar.
                inside = (value + (0.5 if scale.is_whole else 0.0) - bar.low) / (bar.high - bar.low)
            x = start + (index + inside) * step
            anchor = "end" if x > WIDTH * 0.6 else "start"
            shift = -4.0 if anchor == "end" else 4.0
            return [
                line(x, 6.0 + 13.0 * level, x, _BASE, "mark", 1.5),
                text(name, x + shift, 15.0 + 13.0 * level, "tick strong", anchor),
            ]
    return []


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _picture(
    body: Sequence[str],
    title: str,
    description: str,
    height: float = TOP + CHART_HEIGHT + BOTTOM,
    stretch: bool = False,
) -> str:
    """A picture as wide as its place."""
    shape = ' preserveAspectRatio="none"' if stretch else ""
    label = escape(join_pieces(escape_invisible(f"{title}: {description}")), {'"': "&quot;"})
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{label}"{shape}>'
        + element("g", *body)
        + "</svg>"
    )
