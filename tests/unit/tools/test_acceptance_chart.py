"""The acceptance chart is measured, shows the counts, and is legible."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tools.docs import acceptance_chart
from tools.docs.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "guide" / "speculation.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
MADE = (
    acceptance_chart.Count("one", (10, 8, 8, 4, 0), (10, 6, 2, 0, 0), 16),
    acceptance_chart.Count("other", (20, 5, 5, 5, 5), (7, 0, 0, 0, 0), 20),
)


def test_the_drawing_shows_the_counts() -> None:
    root = ElementTree.fromstring(acceptance_chart.svg(MADE))
    scale = 100 * acceptance_chart.PERCENT
    for kind in ("tried", "accepted"):
        bars = [one for one in root.iter(f"{SVG}rect") if one.get("class") == kind]
        shares = [count / one.forwards for one in MADE for count in getattr(one, kind)]
        assert [float(bar.attrib["height"]) for bar in bars] == pytest.approx(
            [scale * share for share in shares], abs=0.01
        )
        for bar in bars:
            foot = float(bar.attrib["y"]) + float(bar.attrib["height"])
            assert foot == pytest.approx(acceptance_chart.GROUND, abs=0.02)
    numbers = [one for one in root.iter(f"{SVG}text") if one.get("class") == "number"]
    assert [one.text or "" for one in numbers] == ["100", "75", "25", "0", "", "35", "0", "0", "0", "0"]
    gains = [one.text for one in root.iter(f"{SVG}text") if one.get("class") == "gain"]
    assert gains == ["+ 1.12 a forward", "+ 0.35 a forward"]


def test_the_hook_puts_the_chart_into_the_page() -> None:
    assert PAGE.count(acceptance_chart.MARK) == 1
    page = acceptance_chart.fill_page(PAGE, lambda: MADE)
    assert acceptance_chart.MARK not in page
    assert page.count("</svg>\n</figure>") == 1
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) == 2
    assert (
        acceptance_chart.on_page_markdown("# Else", page=SimpleNamespace(), config={}, files=[]) == "# Else"
    )


def test_without_models_the_page_says_so_and_a_warning_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DESCANT_MODELS", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        page = acceptance_chart.fill_page(PAGE)
    command = "python tools/models.py smollm2 smol-draft stories15m"
    assert command in page
    assert "<svg" not in page
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.name.startswith("mkdocs.")
    assert command in record.getMessage()
