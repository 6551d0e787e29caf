"""The built site in Chromium: no page runs over its edge, no code is cut, every page is near the home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.browser import chromium

ROOT = Path(__file__).resolve().parents[3]
# What a page is made from: a site that is newer than all of it is current.
SOURCES = ("docs", "mkdocs.yml", "src/descant", "tools/docs", "examples")
WIDTHS = (1400, 390)
PHOTOGRAPHED = ("", "guide/beam-search/", "reference/config/", "reference/api/generate/")
# What lies beyond the right edge of the window, or of a box that hides it, and cannot be scrolled to.
CUT = """
() => {
    const edge = document.documentElement.clientWidth;
    const found = [];
    if (document.documentElement.scrollWidth > edge) found.push(`page ${document.documentElement.scrollWidth}`);
    const clipped = element => {
        const right = element.getBoundingClientRect().right;
        for (let box = element.parentElement; box; box = box.parentElement) {
            const overflow = getComputedStyle(box).overflowX;
            if (overflow === "auto" || overflow === "scroll") return false;
            if (overflow !== "visible" && right > box.getBoundingClientRect().right + 1) return true;
            if (box.matches("article")) break;
        }
        return right > edge + 1;
    };
    for (const element of document.querySelectorAll("article :is(p, li, pre, code, table, td, th, img, svg, h1, h2, h3)")) {
        if (element.getBoundingClientRect().width > 0 && element.checkVisibility() && clipped(element)) {
            found.push(`${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
        }
    }
    return found;
}
"""  # noqa: E501


def is_current(site: Path) -> bool:
    """Whether a built site is newer than everything it is made from."""
    home = site / "index.html"
    if not home.exists():
        return False
    files = [
        file for name in SOURCES for file in [ROOT / name, *(ROOT / name).rglob("*")]
        if file.is_file() and "__pycache__" not in file.parts
    ]  # fmt: skip
    return max(file.stat().st_mtime for file in files) < home.stat().st_mtime


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; CI has built it before the tests."""
    if is_current(ROOT / "site"):
        return ROOT / "site"
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.started() as browser:
        yield browser


def open_page(browser: Browser, file: Path, width: int = WIDTHS[0], **given: Any) -> Page:
    page = browser.new_context(**chromium.options(width, 900, **given)).new_page()
    page.goto(file.as_uri())
    return page


def settle(page: Page) -> None:
    """Wait for two frames: sizes have then followed the window."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_nothing_is_cut_on_any_page(site: Path, browser: Browser) -> None:
    files = sorted(site.rglob("index.html"))
    assert len(files) > 80
    page = open_page(browser, files[0])
    problems = []
    for file in files:
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        page.goto(file.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            settle(page)
            problems += [f"{file.relative_to(site)} at {width}: {one}" for one in page.evaluate(CUT)]
    page.context.close()
    assert problems == []


def test_what_is_cut_is_found(tmp_path: Path, browser: Browser) -> None:
    word, box = "x" * 300, "width: 200px; overflow: hidden"
    wide = f"<article><pre>{word}</pre><div style='{box}'><code>{word}</code></div></article>"
    scrolled = f"<article><div style='{box}; overflow-x: auto'><pre>{word}</pre></div></article>"
    (tmp_path / "wide.html").write_text(wide, encoding="utf-8")
    (tmp_path / "scrolled.html").write_text(scrolled, encoding="utf-8")
    page = open_page(browser, tmp_path / "wide.html", 390)
    assert [one.partition(" ")[0] for one in page.evaluate(CUT)] == ["page", "CODE"]
    page.goto((tmp_path / "scrolled.html").as_uri())
    assert page.evaluate(CUT) == []
    page.context.close()


@cache
def linked(file: Path) -> frozenset[Path]:
    """The pages that the text of a page links to; the navigation does not count, since a phone hides it."""
    article = re.search(r"<article.*?</article>", file.read_text(encoding="utf-8"), re.DOTALL)
    assert article, file
    found = set()
    for target in re.findall(r'<a [^>]*?href="([^"#?]*)', article[0]):
        if target and "://" not in target and not target.startswith("mailto:"):
            path = Path(os.path.normpath(file.parent / target))
            found.add(path / "index.html" if path.suffix == "" else path)
    return frozenset(found)


def test_every_page_is_two_clicks_from_home(site: Path) -> None:
    home = site / "index.html"
    near = {home} | linked(home)
    near |= set().union(*(linked(file) for file in near if file.exists() and file.suffix == ".html"))
    assert sorted(str(page.relative_to(site)) for page in set(site.rglob("index.html")) - near) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_names_of_parameters_are_whole(site: Path, browser: Browser, width: int) -> None:
    for page_name in ("reference/config/", "reference/api/generate/"):
        page = open_page(browser, site / page_name / "index.html", width)
        settle(page)
        names = page.evaluate(
            """() => [...document.querySelectorAll(".parameters td:first-child code")]
                .map(code => [code.textContent, code.getClientRects().length])"""
        )
        assert len(names) > 20
        assert [name for name, lines in names if lines != 1] == []
        assert "\\" not in page.inner_text("article .parameters >> nth=0")
        page.context.close()


def test_headers_of_tables_stay_in_sight(site: Path, browser: Browser) -> None:
    """Of one that fits, below the page's header; of one that does not, at the top of its own box."""
    page = open_page(browser, site / "reference/config/index.html")
    settle(page)
    page.evaluate("document.querySelectorAll('.fits tbody tr:last-child')[3].scrollIntoView({block: 'end'})")
    settle(page)
    place = "() => document.querySelectorAll('.fits th:first-child')[3].getBoundingClientRect().top"
    assert 40 <= page.evaluate(place) <= 60
    page.goto((site / "guide/combinations/index.html").as_uri())
    settle(page)
    apart = page.evaluate(
        """() => {
            const box = [...document.querySelectorAll(".md-typeset__scrollwrap:not(.fits)")]
                .find(box => box.scrollHeight > box.clientHeight + 50);
            box.scrollTop = 50;
            return box.querySelector("th").getBoundingClientRect().top - box.getBoundingClientRect().top;
        }"""
    )
    assert abs(apart) <= 1
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_light_and_dark(site: Path, browser: Browser, scheme: str, tmp_path: Path) -> None:
    """Photographs of four pages are in the folder of the test."""
    for width in WIDTHS:
        for name in PHOTOGRAPHED:
            page = open_page(browser, site / name / "index.html", width, color_scheme=scheme)
            settle(page)
            page.screenshot(path=tmp_path / f"{name.strip('/').replace('/', '-') or 'home'}-{width}.png")
            behind, text = page.evaluate(
                """() => ["background-color", "color"].map(name => {
                    const color = getComputedStyle(document.body).getPropertyValue(name);
                    return color.match(/[\\d.]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 3;
                })"""
            )
            assert (behind > text) == (scheme == "light")
            assert page.evaluate(CUT) == []
            page.context.close()
