"""No text of a trace is ever more than text: not in the page, in a notebook, in SVG or in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.trace import Trace
from descant.trace.trace_data import PICTURES, text_pieces
from tests.e2e.browser import hostile, sample_pages
from tests.e2e.browser.chromium import Sheet

Open = Callable[..., Sheet]
TAME = ["<s>", *(f" word{place}" for place in range(70)), "a line\n", "\ttabbed", "x", "x" * 2_000]
SVG = "{http://www.w3.org/2000/svg}"

# Goes through every view, step and request as a reader would, and notes what is shown and what it is made of.
WALK = """
() => {
    const kinds = new Set(), words = {}, stages = new Set(), tabs = new Set(), pages = [];
    let tips = 0;
    const note = root => {
        for (const one of root.querySelectorAll("*"))
            kinds.add([one.localName, ...one.getAttributeNames()].join(" "));
        for (const one of root.querySelectorAll("[data-token]:not([data-token=''])")) {
            const inside = [...one.querySelectorAll(".word")];
            const found = inside.find(word => word.closest("[data-token]") === one);
            if (found) (words[one.dataset.token] ??= new Set()).add(found.textContent);
        }
        for (const one of root.querySelectorAll("[data-stage] h3")) stages.add(one.lastChild.textContent);
    };
    const put = (control, value, type) => {
        control.value = value;
        control.dispatchEvent(new Event(type, {bubbles: true}));
    };
    const texts = selector => [...document.querySelectorAll(selector)].map(one => one.textContent);
    const options = [...document.getElementById("choose-request").options].map(one => one.value);
    for (const option of options) {
        put(document.getElementById("choose-request"), option, "change");
        for (const tab of [...document.querySelectorAll("[role=tab]")].map(one => one.id)) {
            tabs.add(tab);
            document.getElementById(tab).click();
            const range = document.getElementById("step");
            const view = document.querySelector("[role=tabpanel]:not([hidden])");
            for (let step = 0; step <= Number(range.max); step++) {
                put(range, step, "input");
                note(view);
            }
            const tip = document.getElementById("tip");
            for (const one of view.querySelectorAll(".flow .tok")) {
                one.focus();
                tips += Number(!tip.hidden && tip.querySelectorAll("tbody tr").length > 1);
                note(tip);
            }
        }
        note(document);
        pages.push({
            method: texts(".method"), error: texts(".notice.bad"), prompt: texts(".prompt"),
            names: texts(".chip .key"), values: texts(".chip .value"),
        });
    }
    return {
        pages, tips, kinds: [...kinds], tabs: [...tabs], stages: [...stages],
        title: document.title, heading: texts("h1"),
        words: Object.fromEntries(Object.entries(words).map(([token, found]) => [token, [...found]])),
        hit: window.hit ?? null, polluted: ({}).hit ?? null,
    };
}
"""


def same(found: str, expected: str) -> bool:
    """Whether a text is as it is to be shown; a long one may end early, if it says so.

    A mark for the end of a line may be followed by one.
    """
    found = found.replace("\n", "")
    if found.endswith("…") and len(found) > 50:
        return expected.startswith(found[:-1])
    return found == expected


def shows(found: str, text: str, spaces: bool = False) -> bool:
    return same(found, join_pieces(escape_invisible(text, spaces)))


def walked(sheet: Open, folder: Path, texts: list[str]) -> tuple[Trace, dict[str, Any]]:
    """The page of a trace of these texts, gone through from end to end."""
    trace = sample_pages.of_texts(texts)
    path = folder / "page.html"
    path.write_text(trace.html(title=" | ".join(texts)), encoding="utf-8")
    opened = sheet(path)
    found = opened.page.evaluate(WALK)
    opened.check()
    return trace, found


@pytest.fixture(scope="module")
def tame() -> dict[str, Any]:
    """Filled by the first page: what a page of harmless texts is made of."""
    return {}


@pytest.mark.parametrize("family", hostile.FAMILIES)
def test_the_page_shows_it_as_text(family: str, sheet: Open, tmp_path: Path, tame: dict[str, Any]) -> None:
    if not tame:
        tame.update(walked(sheet, tmp_path, TAME)[1])
    texts = hostile.of(family)
    trace, found = walked(sheet, tmp_path, texts)
    assert (found["hit"], found["polluted"]) == (None, None)
    assert set(found["kinds"]) - set(tame["kinds"]) == set()
    [heading] = found["heading"]
    assert shows(heading, " | ".join(texts))
    assert found["title"] == " ".join(heading.split())
    assert {"tab-text", "tab-processors", "tab-speculation"} <= set(found["tabs"])
    assert found["tips"] == 2 * len(texts)  # in the text, and along its drafts
    for text in texts:
        assert any(shows(stage, text) for stage in found["stages"])
    tokens = range(sample_pages.FIRST, sample_pages.FIRST + len(texts))
    assert {int(token) for token in found["words"]} == set(tokens)
    for token, text in zip(tokens, texts, strict=True):
        for one in found["words"][str(token)]:
            # Alone, a space that it begins with is a dot; in a line it may stand before what is shaded.
            assert shows(one, text) or shows(one, text, spaces=True) or shows(" " + one, text)
    whole, *others = found["pages"]
    [prompt] = whole["prompt"]
    assert same(prompt, join_pieces(text_pieces(trace, tokens)))
    for text, page in zip(texts, others, strict=True):
        [method], [error], [name, _], [value, _] = (
            page[one] for one in ("method", "error", "names", "values")
        )
        assert shows(method, text)
        assert shows(error.removeprefix("The run ended with an error: "), text)
        assert shows(name, text)
        assert shows(value, text) or shows(value.removeprefix('"'), text)  # what is cut is JSON


# Goes through the requests of two runs side by side.
BESIDE = """
() => {
    document.getElementById("tab-beside").click();
    const choose = document.getElementById("choose-request");
    const kinds = new Set(), cells = new Set(), texts = {0: [], 1: []};
    for (const option of [...choose.options].map(one => one.value)) {
        choose.value = option;
        choose.dispatchEvent(new Event("change", {bubbles: true}));
        const view = document.getElementById("view-beside");
        for (const one of view.querySelectorAll("*"))
            kinds.add([one.localName, ...one.getAttributeNames()].join(" "));
        for (const one of view.querySelectorAll("td, th, h3")) cells.add(one.textContent);
        for (const half of option === "0" ? view.querySelectorAll(".half") : [])
            texts[half.dataset.run] = [...half.querySelectorAll(".tok .word")].map(one => one.textContent);
    }
    return {kinds: [...kinds], cells: [...cells], texts: [texts[0], texts[1]], hit: window.hit ?? null};
}
"""


def test_side_by_side_shows_it_as_text(sheet: Open, tmp_path: Path) -> None:
    """All of them in one page: as tokens of both runs, as methods, as names and values of what was set."""
    path, found = tmp_path / "page.html", {}
    everything = [text for _, text in hostile.cases()]
    for name, texts in (("tame", TAME), ("hostile", everything)):
        path.write_text(
            sample_pages.of_texts(texts).html(sample_pages.of_texts(texts[::-1])), encoding="utf-8"
        )
        opened = sheet(path)
        found[name] = opened.page.evaluate(BESIDE)
        opened.check()
    seen = found["hostile"]
    assert len(everything) > 150
    assert seen["hit"] is None
    assert set(seen["kinds"]) - set(found["tame"]["kinds"]) == set()
    for texts, words in zip((everything, everything[::-1]), seen["texts"], strict=True):
        for text, one in zip(texts, words, strict=True):
            assert shows(one, text) or shows(" " + one, text), (one, text)
    told = "\0".join(seen["cells"]).replace("\n", "")
    # Some are cut, and equal parts are not reported.
    assert sum(join_pieces(escape_invisible(text))[:50] in told for text in everything) > 100


# ------------------------------------------------------------------------ in a notebook
class Tags(HTMLParser):
    """The tags of a piece of HTML, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("family", hostile.FAMILIES)
def test_a_notebook_gets_one_frame_and_nothing_else(family: str) -> None:
    trace = sample_pages.of_texts(hostile.of(family))
    tags = Tags()
    tags.feed(trace._repr_html_())
    tags.close()
    [(tag, attributes)] = tags.found
    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", "allow-scripts", trace.html())


# ------------------------------------------------------------------------ as SVG
def pictures(trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every picture that a trace has, and what to call it with."""
    for picture in PICTURES:
        yield picture, {"beside": trace} if picture == "beside" else {}


@pytest.mark.parametrize("family", ["scripts", "handlers", "addresses", "styles", "entities"])
def test_svg_is_quiet_in_the_browser(family: str, sheet: Open, tmp_path: Path) -> None:
    trace = sample_pages.of_texts(hostile.of(family))
    for name, options in pictures(trace):
        path = tmp_path / f"{name}.svg"
        path.write_text(trace.svg(name, **options), encoding="utf-8")
        opened = sheet(path)
        assert opened.page.evaluate("window.hit ?? null") is None
        assert opened.page.evaluate("document.documentElement.localName") == "svg"
        opened.check()
