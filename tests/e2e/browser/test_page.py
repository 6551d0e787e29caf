"""The page as such: on a phone, in the dark, read aloud, in a notebook, and when a run is long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

import descant
from descant import Trace
from tests.e2e.browser import reading, sample_pages
from tests.e2e.browser.chromium import Sheet
from tests.e2e.browser.runs import Runs
from tests.e2e.browser.test_pictures import show, tabs
from tests.support import tiny_models

Open = Callable[..., Sheet]
SEEN = ["sampling", "diverse", "constrained", "speculation", "batch", "beside"]
NAMED = {
    "button", "combobox", "group", "image", "listbox", "option", "radio", "radiogroup", "slider", "tab",
    "tabpanel", "tree", "treeitem",
}  # fmt: skip


@pytest.mark.ci_cases("beside-dark", "sampling-light", "speculation-dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", SEEN)
def test_texts_stand_out_from_what_is_behind_them(name: str, scheme: str, runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page(name), color_scheme=scheme).page
    poor: set[str] = set()
    for one in tabs(page):
        show(page, one)
        if one == "text":
            page.locator("#view-text .flow .tok .word").first.hover()
        found = page.evaluate(reading.CONTRAST)
        assert found["seen"] > 20
        poor |= set(found["poor"])
    assert poor == set()


@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("name", SEEN)
def test_nothing_hangs_over_the_side(name: str, width: int, runs: Runs, sheet: Open) -> None:
    opened = sheet(runs.page(name), width=width, height=800, has_touch=width < 1000)
    for one in tabs(opened.page):
        show(opened.page, one)
        wide = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide == [width, width], one
    opened.check()


def test_nothing_moves_by_itself_where_motion_is_not_wanted(runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page("beams")).page
    for one in tabs(page):
        show(page, one)
        moving = page.evaluate(
            """[...document.querySelectorAll("*")].filter(one => {
                const style = getComputedStyle(one);
                return style.transitionDuration.split(",").some(time => parseFloat(time) > 0)
                    || style.animationName !== "none";
            }).length"""
        )
        assert moving == 0


@pytest.mark.parametrize("name", SEEN)
def test_whatever_can_be_used_or_read_aloud_has_a_name(name: str, runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page(name)).page
    protocol = page.context.new_cdp_session(page)
    seen = set()
    for one in tabs(page):
        show(page, one)
        for node in protocol.send("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value")
            if node["ignored"] or role not in NAMED:
                continue
            seen.add(role)
            assert node.get("name", {}).get("value", "").strip(), (one, node)
    assert {"button", "listbox", "option", "slider", "tab", "tabpanel", "tree", "treeitem"} <= seen


# ------------------------------------------------------------------------ in a notebook
def test_a_notebook_shows_it_and_is_left_alone(runs: Runs, sheet: Open, tmp_path: Path) -> None:
    trace = runs.trace("beams")
    host = tmp_path / "host.html"
    host.write_text(
        "<!doctype html><meta charset=utf-8><title>host</title><style>* {color: red}</style><p data-node>"
        + trace._repr_html_(),
        encoding="utf-8",
    )
    opened = sheet(host)
    frame = opened.page.frames[1]
    expect(opened.page.frame_locator("iframe").locator("#tree [data-node]").first).to_be_visible()
    read = {int(number) for number in frame.evaluate(reading.TREE)}
    assert read == trace.tree.nodes.keys()
    opened.check()
    assert frame.evaluate("getComputedStyle(document.querySelector('h1')).color") != "rgb(255, 0, 0)"
    for reach in ("parent.document.title", "parent.location.href", "localStorage.length", "document.cookie"):
        name = frame.evaluate(
            f"() => {{ try {{ return String({reach}); }} catch (error) {{ return error.name; }} }}"
        )
        assert name == "SecurityError"
    assert opened.page.title() == "host"


# ------------------------------------------------------------------------ long runs
@pytest.fixture(scope="module")
def long(tiny: Callable[..., tiny_models.Tiny]) -> Callable[..., Trace]:
    """`long(steps, ...)`: so many steps of a tiny model."""

    def ran(steps: int, **fields: object) -> Trace:
        ids = torch.tensor([[5, 6, 7, 8]])
        given = {"max_new_tokens": steps, "min_new_tokens": steps, **fields}
        found: Trace = descant.generate(
            tiny("llama").model, input_ids=ids, attention_mask=torch.ones_like(ids), trace=True, **given
        ).trace
        return found

    return ran


def clock(page: Page) -> Callable[[], float]:
    """A counter of the seconds of a page's own work, without other processes."""
    protocol = page.context.new_cdp_session(page)
    protocol.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_seconds() -> float:
        metrics = protocol.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    return busy_seconds


def test_two_thousand_steps_open_at_once(long: Callable[..., Trace], sheet: Open, tmp_path: Path) -> None:
    drawn = {"do_sample": True, "seed": 1, "temperature": 0.9, "top_k": 50, "top_p": 0.95}
    trace = sample_pages.again(long(250, repetition_penalty=1.1, **drawn), 8)
    assert len(trace.steps) == 2000
    path = tmp_path / "run.html"
    path.write_text(trace.html(), encoding="utf-8")
    assert path.stat().st_size <= 2_000_000
    opened = sheet(path)
    page = opened.page
    busy_seconds = clock(page)
    before = busy_seconds()
    opened.open(path)
    assert 0.01 < busy_seconds() - before < 2
    for name in tabs(page):
        show(page, name)
    expect(page.locator("#view-text .flow .tok")).to_have_count(2000)
    opened.check()
