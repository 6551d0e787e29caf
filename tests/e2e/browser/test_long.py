"""A page of one very long run is drawn in every view, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
)
from descant.trace.trace import Trace
from tests.e2e.browser.chromium import Sheet

COUNT = 50_000


def long_run() -> Trace:
    """A forward that verified fifty thousand drafts, then one that took back as many."""
    look = ChoiceRecord(1.0, 1.0, tuple(CandidateRecord(token, -1.0, -2.0) for token in range(3)))
    first = RunRecord((0,) * COUNT, tuple(range(1, COUNT + 1)))
    rows = RowRecord(0, 0, looks=(look,) * COUNT, drafts=(0,) * COUNT, runs=(first,))
    return Trace([
        TraceHeader("0", "Invented", 3, 3, 4_000_000),
        TokenTexts({0: " a", 1: "b", 2: "c"}),
        RequestRecord(0, 0, (1,), "greedy search", drafter="Assistant"),
        StepRecord(0, 0.1, (rows,)),
        ResultRecord(0, (ReturnedSequence((0,) * COUNT, "length", COUNT),)),
    ])  # fmt: skip


def test_every_view_of_a_long_run_is_drawn(sheet: Callable[..., Sheet], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(long_run().html(), encoding="utf-8")
    opened = sheet(path)
    page = opened.page
    page.wait_for_selector("[data-node]")
    tabs = [tab.get_attribute("id") for tab in page.query_selector_all("[role=tab]")]
    assert tabs == ["tab-tree", "tab-text", "tab-processors", "tab-speculation"]
    for tab in tabs:
        page.click(f"#{tab}", timeout=60_000)
    assert page.locator("#view-text .tok[data-place]").count() == 10_000
    assert "the last 10,000 tokens are drawn" in page.locator(".notice").all_text_contents()[0]
    assert "the first 2,000 choices are listed" in page.locator("#view-processors").text_content()
    opened.check()
