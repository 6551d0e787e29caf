"""The page of a trace: it is self-contained, runs only its own scripts, and is bounded."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import random
import re
import zlib
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from descant.trace.pictures import page as module
from descant.trace.pictures.page import MAX_PAGE_BYTES, build_page_data, render_page
from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
    to_json_line,
)
from descant.trace.trace import Trace
from tests.unit.trace import fakes

ASSETS = files("descant.trace.pictures") / "assets"
SINKS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "setHTML", "document.write", "DOMParser",
    "parseFromString", "WebSocket", "EventSource",
    "createContextualFragment", "srcdoc", 'setAttribute("style"', 'setAttribute("on', "javascript:", "eval(",
    "Function(", "import(", "importScripts", "Worker(", "fetch(", "XMLHttpRequest",
    "sendBeacon", "localStorage", "document.cookie", "window.open", "location",
)  # fmt: skip


class Found(HTMLParser):
    """The elements of a page, and what is in its scripts, styles and notes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self._name: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._name = "scene" if dict(attrs).get("id") == "scene" else tag

    def handle_endtag(self, tag: str) -> None:
        self._name = None

    def handle_data(self, data: str) -> None:
        if self._name is not None:
            self.inside[self._name] = self.inside.get(self._name, "") + data


def packed(text: str) -> dict:
    """The scene that a page holds."""
    return json.loads(zlib.decompress(base64.b64decode(Found(text).inside["scene"])))


def test_a_page_holds_its_scene() -> None:
    trace, other = fakes.beams(4, 12, groups=2, demands=2), fakes.beams(2, 6)
    made = json.loads(json.dumps(build_page_data(trace, other, "Two")))
    assert packed(render_page(trace, other, "Two")) == {**made, "notes": []}


def test_only_the_pages_own_script_and_style_are_allowed() -> None:
    found = Found(render_page(fakes.beams()))
    policy = next(attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv"))
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.inside[name].encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    names = [tag for tag, _ in found.tags]
    assert names.count("script") == 2
    assert names.count("style") == 1


def test_a_page_makes_no_requests() -> None:
    text = render_page(fakes.beams())
    found = Found(text)
    assert not {"src", "href", "srcset", "action", "data"} & {
        name for _, attrs in found.tags for name in attrs
    }
    assert not re.search(r"//[a-z0-9]+\.|https?:|url\(|@import", text)


@pytest.mark.parametrize("name", sorted(one.name for one in ASSETS.iterdir()))
def test_no_file_of_the_page_parses_markup_or_loads_anything(name: str) -> None:
    text = (ASSETS / name).read_text("utf-8")
    assert [one for one in SINKS if one in text] == []
    assert "</script" not in text.lower()
    assert "<!--" not in text
    assert name in (*module._SCRIPTS, *module._STYLES)


def test_texts_of_a_trace_are_no_markup() -> None:
    title = "</title></pre></noscript><script>alert(1)</script><img src=x onerror=alert(1)>"
    text = render_page(fakes.beams(4, 12), title=title)
    found = Found(text)
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not any(tag == "img" for tag, _ in found.tags)
    assert found.inside["title"] == title
    assert packed(text)["title"] == title


def test_without_scripts_there_is_the_text() -> None:
    trace = fakes.beams(4, 12)
    assert html.escape(trace.text()) in render_page(trace)


def test_a_trace_without_requests_is_a_page() -> None:
    assert packed(render_page(Trace([TraceHeader("0", "Invented", 1, 1, 1)])))["runs"][0]["requests"] == []


def noise(steps: int, top: int) -> Trace:
    """A trace that hardly compresses: four megabytes of it are more than a page may have."""
    draw = random.Random(0)
    tokens = range(50_000)
    texts = {token: f"{draw.getrandbits(40):x}" for token in range(0, 50_000, 5)}
    records: list = [
        TraceHeader("0", "Invented", 50_000, top, 4_000_000),
        TokenTexts(texts),
        RequestRecord(0, 0, tuple(draw.choices(tokens, k=1000)), "greedy search"),
    ]
    for step in range(steps):
        chosen = draw.sample(tokens, top)
        logs = [[round(-12 * draw.random(), 4) for _ in chosen] for _ in range(2)]
        candidates = tuple(CandidateRecord(*one) for one in zip(chosen, *logs, strict=True))
        stages = tuple(ProcessorRecord(f"Stage{at}", draw.randrange(50_000)) for at in range(2))
        look = ChoiceRecord(draw.random(), draw.random(), candidates, stages)
        run = RunRecord((chosen[0],), (step + 1,), score=-draw.random())
        records.append(
            StepRecord(
                step, draw.random(), (RowRecord(0, step, 0, (look,), (), (run,)),), draw.getrandbits(30)
            )
        )
    return Trace(records)


def test_a_page_is_bounded_and_lists_what_it_omits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = noise(400, 8)
    whole, least = render_page(trace), render_page(Trace([TraceHeader("0", "Invented", 1, 1, 1)]))
    assert packed(whole)["notes"] == []
    seen = set()
    for share in (0.9, 0.7, 0.5, 0.35, 0.2, 0.1):
        limit = len(least) + 2000 + int(share * (len(whole) - len(least)))
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", limit)
        text = render_page(trace)
        assert len(text.encode()) <= limit
        told = packed(text)
        (note,) = told["notes"]
        seen.add(note)
        assert (len(told["runs"][0]["requests"][0]["steps"]) < 400) == ("steps" in note)
    assert len(seen) >= 4


def test_the_limit_is_two_megabytes_and_holds_for_five_of_noise() -> None:
    trace = noise(10_000, 10)
    assert sum(len(to_json_line(one)) for one in trace.records) > 5_000_000
    assert MAX_PAGE_BYTES == 2_000_000
    assert len(render_page(trace).encode()) <= MAX_PAGE_BYTES
