"""The report of a job in a browser: nothing runs, it fits any width, in the light and the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from descant.jobs.job_report import ReportFacts, write_report
from tests.e2e.browser import chromium, reading
from tests.e2e.browser.hostile import HIT


def results(text: str) -> Iterator[dict[str, Any]]:
    for row in range(300):
        best = {
            "text": f"{text} {row}",
            "tokens": row * row % 97,
            "finish_reason": "eos" if row % 3 else "length",
        }
        vote = {"score": row % 8 / 8, "answer": text, "votes": row % 8}
        yield {"row": row, "question": text * 20, "completions": [{**best, **vote}]}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    hostile = f"</p></style><script>{HIT}</script><img src=x onerror={HIT}>"
    facts = ReportFacts(
        title="Questions" + hostile, model="models/smollm2", source=["a.jsonl", "b.jsonl"], rows=310,
        settings={"temperature": 0.7, "name": "long_" * 40}, unique_rows=100, generated_tokens=10**6,
        seconds=5000.0, drafted=(400, 300, 100), accepted=(300, 150, 20),
    )  # fmt: skip
    errors = [{"row": 300 + row, "error": f"`prompt` must be text {hostile}, got {row}"} for row in range(10)]
    write_report(tmp_path / "report.html", facts, results(hostile), errors)
    return tmp_path / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_report_is_readable_and_does_nothing(
    browser: Browser, report: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(**chromium.options(width=width, color_scheme=scheme))
    try:
        sheet = chromium.sheet(context)
        sheet.page.goto(report.as_uri())  # not `open`, which waits for the tree of a trace
        assert sheet.page.locator("svg").count() == 4
        assert sheet.page.locator(".row").count() == 10
        assert sheet.page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
        found = sheet.page.evaluate(reading.CONTRAST)
        assert found["seen"] > 60
        assert found["poor"] == []
        assert sheet.page.evaluate("[window.hit === undefined, document.scripts.length]") == [True, 0]
        # Each text of a picture is inside of its card, and no two of them overlap.
        assert sheet.page.evaluate(OVERLAPS) == []
        sheet.check()
    finally:
        context.close()


OVERLAPS = """
() => [...document.querySelectorAll("svg")].flatMap(picture => {
    const card = picture.closest(".card").getBoundingClientRect();
    const boxes = [...picture.querySelectorAll("text")]
        .map(one => ({name: one.textContent, at: one.getBoundingClientRect()}));
    const poor = boxes.filter(one => one.at.left < card.left || one.at.right > card.right);
    const meet = (one, two) => one.left < two.right && two.left < one.right
        && one.top < two.bottom && two.top < one.bottom;
    boxes.forEach((one, index) => {
        poor.push(...boxes.slice(0, index).filter(other => meet(one.at, other.at)));
    });
    return poor.map(one => one.name);
})
"""
