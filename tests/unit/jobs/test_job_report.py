"""The report of a job: its figures from a stream, histograms of any order, and a page of escaped text."""

from __future__ import annotations

import itertools
import math
import random
import re
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from descant.jobs.job_report import ReportFacts, render_report, write_report
from descant.jobs.report_charts import (
    AdaptiveHistogram,
    HistogramBar,
    ValueScale,
    collect_figures,
    draw_acceptance,
    draw_histogram,
    draw_shares,
    format_share,
)

FACTS = ReportFacts(title="Capitals", model="models/smollm2", source=["countries.jsonl"], rows=100)
VOID = {"meta", "rect", "line"}


def result(row: int, text: str = "Paris", tokens: int = 4, **more: Any) -> dict[str, Any]:
    completion = {"text": text, "tokens": tokens, "finish_reason": "length", **more}
    return {"row": row, "country": f"c{row}", "completions": [completion]}


class PageReader(HTMLParser):
    """The texts of a page by tag and class; fails where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.found: list[tuple[tuple[str, str], str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.found.append((self.open[-1], data.strip()))

    def texts(self, tag: str, kind: str | None = None) -> list[str]:
        return [text for (name, found), text in self.found if name == tag and kind in (None, found)]


def rendered(results: Any, errors: Any = (), facts: ReportFacts = FACTS) -> str:
    return render_report(facts, collect_figures(results, errors))


# ------------------------------------------------------------------------ histograms
def test_bars_are_of_round_widths_and_count_every_value() -> None:
    histogram = AdaptiveHistogram(0)
    for value in [*range(100), 3, 3]:
        histogram.add(value)
    bars = histogram.bars()
    assert [(bar.low, bar.high) for bar in bars] == [(low, low + 5) for low in range(0, 100, 5)]
    assert [bar.count for bar in bars] == [7, *[5] * 19]
    assert (histogram.quantile(0.5), histogram.quantile(0.0), histogram.quantile(1.0)) == (48, 0, 99)
    assert histogram.mean == pytest.approx((sum(range(100)) + 6) / 102)
    assert AdaptiveHistogram(0).bars() == []


def test_values_at_an_edge_are_in_the_bar_that_begins_there() -> None:
    histogram = AdaptiveHistogram(6)
    for tenth in range(11):
        histogram.add(round(tenth / 10, 6))
    for bar in histogram.bars():
        inside = [tenth for tenth in range(11) if bar.low <= round(tenth / 10, 6) < bar.high]
        assert bar.count == len(inside), bar


@pytest.mark.parametrize("digits", [0, 6])
def test_the_order_of_values_does_not_matter(digits: int) -> None:
    rng = random.Random(digits)
    values = [round(rng.gauss(0, 50), digits) for _ in range(3000)] + [0.1, -7.0]
    seen = []
    for _ in range(3):
        rng.shuffle(values)
        histogram = AdaptiveHistogram(digits, max_bins=64)
        for value in values:
            histogram.add(value)
        seen.append((histogram.bars(), histogram.quantile(0.25)))
        assert len(histogram._bins) <= 64
        assert sum(bar.count for bar in histogram.bars()) == len(values)
    assert seen[0] == seen[1] == seen[2]


def test_a_few_far_values_do_not_squeeze_the_others() -> None:
    histogram = AdaptiveHistogram(6)
    for at in range(1000):
        histogram.add(at / 1000)
    histogram.add(1e9)
    histogram.add(-1e300)
    histogram.add(1.7e308)
    bars = histogram.bars()
    assert len(bars) > 15
    assert (bars[0].low, bars[-1].high) == (-math.inf, math.inf)
    assert sum(bar.count for bar in bars) == 1003
    assert bars[0].count + bars[-1].count < 20


@pytest.mark.parametrize("value", [0.0, -3.25, 5e-7, 1e12, 7.0])
def test_equal_values_are_one_bar(value: float) -> None:
    histogram = AdaptiveHistogram(6)
    for _ in range(3):
        histogram.add(value)
    [bar] = histogram.bars()
    assert bar.count == 3
    assert bar.low <= round(value, 6) < bar.high


# ------------------------------------------------------------------------ figures
def test_figures_of_results_and_errors() -> None:
    results = [result(row, tokens=row + 1) for row in range(12)]
    results[3]["completions"].append({"text": "b", "tokens": 9, "finish_reason": "eos"})
    errors = [
        {"row": 12, "error": "`country` must hold a text or a number for the template, got None"},
        {"row": 13, "error": "`prompt` must be text, got 3"},
        {"row": 14, "id": "k", "error": "`prompt` must be text, got 4: write it so"},
    ]
    figures = collect_figures(iter(results), iter(errors))
    assert (figures.results, figures.failed, figures.completions) == (12, 3, 13)
    assert figures.tokens == sum(range(1, 13)) + 9
    assert figures.finish_reasons == {"length": 12, "eos": 1}
    assert [record["row"] for record in figures.sample] == list(range(10))
    [(reason, first), (other, second)] = figures.top_reasons()
    assert (reason, first.count, first.row) == ("`prompt` must be text", 2, 13)
    assert first.message == "`prompt` must be text, got 3"
    assert (other, second.count) == ("`country` must hold a text or a number for the template", 1)
    assert figures.scores.count == figures.voted == 0


def test_votes_are_agreement_and_other_scores_are_scores() -> None:
    votes = [result(0, score=1.0, answer="4", votes=4), result(1, score=0.5, answer="4", votes=2)]
    votes.append(result(2, score=0.0, answer=None, votes=0))
    figures = collect_figures(votes, [])
    assert (figures.voted, figures.unanimous, figures.unanswered) == (3, 1, 1)
    assert figures.agreement == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert figures.mean_agreement == 0.5
    assert figures.scores.count == 0
    scored = collect_figures([result(0, score=-0.5), result(1, score=2)], [])
    assert (scored.scores.count, scored.voted, scored.scores.mean) == (2, 0, 0.75)


def test_memory_does_not_grow_with_the_rows() -> None:
    def rows(count: int) -> Iterator[dict[str, Any]]:
        for row in range(count):
            yield result(row, text=f"text {row}" * 20, tokens=row * 7919 % 100_003, score=row % 9973 / 7)

    def errors(count: int) -> Iterator[dict[str, Any]]:
        for row in range(count):
            yield {"row": row, "error": f"reason {row} of its own, got {row}"}

    peaks = []
    for count in (20_000, 60_000):
        tracemalloc.start()
        figures = collect_figures(rows(count), errors(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (figures.results, figures.failed) == (count, count)
        assert len(figures.reasons) <= 1001
        assert sum(one.count for one in figures.reasons.values()) == count
    assert peaks[1] < 1.3 * peaks[0]


# ------------------------------------------------------------------------ the page
def test_a_page_has_every_figure(tmp_path: Path) -> None:
    facts = ReportFacts(
        title="Capitals", model="models/smollm2", source=["a.jsonl", "b.csv", "c", "d", "e"], rows=1300,
        settings={"temperature": 0.7, "select": "vote"}, unique_rows=900, generated_tokens=50_000,
        seconds=125.0, drafted=(400, 300, 100), accepted=(300, 150, 20),
    )  # fmt: skip
    results = [
        result(row, tokens=row % 40, score=row % 5 / 4, answer=str(row % 5), votes=row % 5)
        for row in range(1200)
    ]
    path = tmp_path / "report.html"
    write_report(path, facts, iter(results), iter([{"row": 1200, "error": "`prompt` must be text, got 3"}]))
    reader = PageReader(path.read_text(encoding="utf-8"))
    tiles = dict(zip(reader.texts("dt")[:7], reader.texts("dd", "")[:7], strict=False))
    assert tiles["rows"] == "1,300"
    assert tiles["results"] == "1,200"
    assert tiles["failed"] == "1"
    assert tiles["different texts"] == "900"
    assert tiles["last run"] == "2 min 5 s"
    notes = reader.texts("dd", "note")
    assert {"99 not computed yet", "400 tokens a second", "75 % of the results"} <= set(notes)
    assert reader.texts("h2") == [
        "Length of completions", "Why completions ended", "Agreement of the votes", "Accepted drafts",
        "Rows without a result", "The first 10 rows",
    ]  # fmt: skip
    assert "470 of 800 draft tokens accepted: 58.8 %" in reader.texts("figcaption")
    assert [one for one in reader.texts("text", "tick strong") if "%" in one] == ["75 %", "50 %", "20 %"]
    assert len(reader.texts("h3")) == 10
    assert "draft token 1: 300 of 400 accepted" in reader.texts("title")
    assert reader.texts("p", "example") == ["row 1200: `prompt` must be text, got 3"]


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    results = [result(row, tokens=row, score=row / 7) for row in range(50)]
    pages = []
    for number in range(2):
        write_report(tmp_path / f"{number}.html", FACTS, iter(results), iter([]))
        pages.append((tmp_path / f"{number}.html").read_bytes())
    assert pages[0] == pages[1]


def test_empty_jobs_and_jobs_of_errors_alone_have_a_page() -> None:
    empty = PageReader(rendered([], [], ReportFacts(title="t", model="m", source=["s"], rows=0)))
    assert empty.texts("h2") == []
    failed = PageReader(rendered([], [{"row": 0, "error": "bad"}]))
    assert failed.texts("h2") == ["Rows without a result"]
    whole = PageReader(rendered([result(0)]))
    assert whole.texts("h2")[-1] == "All rows"


HOSTILE = [
    "</style><script>top.hit=1</script>",
    '"><img src=x onerror=top.hit=1>',
    "&lt;b&gt;",
    "\u202eevil\x00",
    "'{}'{title}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_are_escaped_everywhere(text: str) -> None:
    facts = ReportFacts(
        title=text, model=text, source=[text], rows=2, settings={text: text, "table": {"key": text}}
    )
    record = result(0, text, score=1.0, answer=text, votes=1)
    record |= {text: text, "list": [text], "id": text}
    record["completions"][0]["finish_reason"] = text
    page = rendered([record], [{"row": 1, "id": text, "error": f"{text}, got {text}"}], facts)
    reader = PageReader(page)
    assert not {name for (name, _), _ in reader.found} & {"script", "img", "b"} - {"b"}
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "style"]
    assert "<script" not in page
    assert "<img" not in page
    assert "\x00" not in page
    assert "\u202e" not in page
    [policy] = [value for name, value in reader.attributes if value and value.startswith("default-src")]
    assert "'none'" in policy
    if text.isprintable():
        assert text in reader.texts("h1")


def test_nothing_is_fetched_and_nothing_runs() -> None:
    page = rendered([result(row, score=0.5) for row in range(30)])
    assert not re.search(r"https?:|url\(|@import|<script|<link|javascript:", page)


def test_long_texts_and_many_columns_are_cut() -> None:
    record = result(0, "x" * 5000)
    record |= {f"column{number}": "y" * 1000 for number in range(20)}
    record["completions"] *= 9
    reader = PageReader(rendered([record] * 3))
    assert "… 4,100 more characters" in reader.texts("span", "mark")
    assert reader.texts("p", "note").count("5 more completions") == 3
    assert max(len(text) for _, text in reader.found if not text.startswith(":root")) < 1000


# ------------------------------------------------------------------------ charts
def test_charts_name_their_numbers() -> None:
    bars = [HistogramBar(-math.inf, 0, 2), HistogramBar(0, 5, 1000), HistogramBar(5, 10, 0)]
    bars.append(HistogramBar(10, math.inf, 1))
    scale = ValueScale(lambda value: f"{value:.0f}", is_whole=True)
    titles = PageReader(draw_histogram(bars, "T", "row", scale, {"median": 3})).texts("title")
    assert titles == ["below 0: 2 rows", "0 to 4: 1,000 rows", "5 to 9: 0 rows", "10 and more: 1 row"]
    single = ValueScale(lambda value: f"{value:.0f}", is_whole=True).format_range(HistogramBar(3, 4, 1))
    assert single == "3"
    shares = draw_shares([("a", 3), ("b", 1)], "T")
    assert re.findall(r'width="([\d.]+)"', shares) == ["300", "100"]
    assert 'data-accepted="0"' in draw_acceptance([5, 0], [0, 0], "T")


@pytest.mark.parametrize(
    ("count", "total", "shown"),
    [
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1, 3, "33.3 %"),
        (1, 10**6, "< 0.1 %"),
        (10**6 - 1, 10**6, "> 99.9 %"),
        (0, 0, "0 %"),
    ],
)
def test_shares_are_neither_none_nor_all_unless_they_are(count: int, total: int, shown: str) -> None:
    assert format_share(count, total) == shown


def test_labels_do_not_overlap() -> None:
    for count, width in itertools.product((1, 2, 7, 24, 26), (1, 5, 1000)):
        bars = [HistogramBar(at * width, (at + 1) * width, at + 1) for at in range(count)]
        picture = draw_histogram(bars, "T", "row", ValueScale(lambda value: f"{value:.0f}", True), {})
        places = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="171" class="tick"', picture)]
        assert places
        assert all(later - sooner >= 40 for sooner, later in itertools.pairwise(places))
