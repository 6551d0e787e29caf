"""The acceptance chart is measured, shows the counts, and is legible."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import descant
from descant.core.records import Speculation
from tools.docs import acceptance_chart
from tools.docs.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "guide" / "speculation.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
MADE = (
    acceptance_chart.Count("one", (10, 8, 8, 4, 0), (10, 6, 2, 0, 0), 16),
    acceptance_chart.Count("other", (20, 5, 5, 5, 5), (7, 0, 0, 0, 0), 20),
)


def test_a_count_is_the_sum_of_the_reports() -> None:
    reports = [Speculation((4, 2), (3, 1), 6), Speculation((), (), 5), Speculation((1,) * 5, (1,) * 5, 2)]
    count = acceptance_chart.Count.of("name", reports)
    assert count == acceptance_chart.Count("name", (5, 3, 1, 1, 1), (4, 2, 1, 1, 1), 13)
    assert count.accepted_per_forward == pytest.approx(9 / 13)


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


def test_the_drawing_can_be_read() -> None:
    full = (20,) * acceptance_chart.PLACES
    root = ElementTree.fromstring(
        acceptance_chart.svg([acceptance_chart.Count("other tokenizer", full, full, 20)] * 5)
    )
    numbers = [one for one in root.iter(f"{SVG}text") if one.get("class") == "number"]
    # A digit at that size is at most 6.5 wide, a letter of a name at most 7.5.
    assert all(len(one.text or "") * 6.5 < acceptance_chart.PITCH for one in numbers)
    assert all(float(one.attrib["y"]) > 10 for one in numbers)
    names = [one for one in root.iter(f"{SVG}text") if one.get("class") == "name"]
    assert all(len(one.text or "") * 7.5 < acceptance_chart.PANEL for one in names)
    assert all(float(one.attrib["y"]) < acceptance_chart.HEIGHT for one in root.iter(f"{SVG}text"))
    accepted = [float(one.attrib["x"]) + float(one.attrib["width"]) for one in root.iter(f"{SVG}rect")]
    assert max(accepted) < acceptance_chart.WIDTH
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert (desc.text or "").count("20 of 20") == 5 * acceptance_chart.PLACES


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


def test_the_counts_come_from_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models replace the large ones, to save time."""
    loaded = []

    def small(name: Path) -> object:
        loaded.append(name.name)
        return AutoModelForCausalLM.from_pretrained(name.parent / "stories15m")

    def small_tokenizer(name: Path, **options: object) -> object:
        return AutoTokenizer.from_pretrained(name.parent / "stories15m", **options)

    monkeypatch.setattr(acceptance_chart, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=small))
    monkeypatch.setattr(acceptance_chart, "AutoTokenizer", SimpleNamespace(from_pretrained=small_tokenizer))
    calls = []

    def recording_generate(model: object, **fields: object) -> object:
        calls.append(fields)
        exits = {"assistant_early_exit": 2} if "assistant_early_exit" in fields else {}
        return descant.generate(model, **{**fields, **exits})

    monkeypatch.setattr(acceptance_chart, "descant", SimpleNamespace(generate=recording_generate))
    counts = acceptance_chart.measure.__wrapped__()
    assert tuple(loaded) == acceptance_chart.MODELS
    assert [one.name for one in counts] == [
        "prompt lookup", "suffix lookup", "draft model", "other tokenizer", "early exit",
    ]  # fmt: skip
    for count, fields in zip(counts, calls, strict=True):
        assert len(fields["input_ids"]) == len(acceptance_chart.PROMPTS)
        assert all(accepted <= tried for accepted, tried in zip(count.accepted, count.tried, strict=True))
        # A step adds its accepted drafts and one token; a text may end before its last step.
        assert sum(count.accepted) + count.forwards <= len(acceptance_chart.PROMPTS) * acceptance_chart.TOKENS
    draft = counts[2]
    assert draft.accepted == draft.tried  # draft model and model are the same
