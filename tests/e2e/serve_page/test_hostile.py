"""Whatever a model writes, and whatever a prompt holds, is text."""

from __future__ import annotations

import json

import pytest

from tests.e2e.browser.hostile import HIT
from tests.e2e.serve_page.conftest import OpenPage

TEXTS = (
    f"<img src=x onerror={HIT}>",
    f"</script><script>{HIT}</script>",
    f"<svg onload={HIT}>",
    f"<iframe srcdoc='<script>{HIT}</script>'></iframe>",
    f"javascript:{HIT}",
    "<style>*{display:none}</style>",
    "</div></main><h1>gone</h1>",
    "a \u202egnorw\u202c b\u2066c",
    "&lt;b&gt;&amp;",
    "x\u200by\ufeffz",
)  # fmt: skip
# How characters that are not to be seen are shown.
SHOWN = {character: f"U+{ord(character):04X}" for text in TEXTS for character in text if ord(character) > 127}
# The elements that the page makes; a text that became markup would be another.
KINDS = {
    "section", "div", "p", "span", "button", "a", "strong", "input", "label", "figure", "figcaption",
    "svg", "g", "path", "rect", "text", "title",
}  # fmt: skip


def shown(text: str) -> str:
    return "".join(SHOWN.get(one, one) for one in text)


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_hostile_texts_stay_text(open_page: OpenPage, mode: str) -> None:
    page = open_page()
    page.set_mode(mode)
    page.choose("greedy", {"max_tokens": 100})
    for text in TEXTS[:: 1 if mode == "chat" else 4]:
        page.page.locator("#clear").click()
        page.fill("grammar_kind", "")
        page.fill("others", json.dumps({"grammar": {"choice": [text]}}))
        entry = page.ask(text)
        assert page.answer() == shown(text)
        assert entry.locator(".asked").text_content() == shown(text)
        page.page.locator(".flow .tok .ink").first.hover()
        kinds = page.page.evaluate(
            "[...document.querySelectorAll('.transcript *')].map(one => one.localName)"
        )
        assert set(kinds) <= KINDS
        assert page.page.evaluate("document.querySelectorAll('h1').length") == 1
    page.check()


def test_hostile_texts_in_a_tree_and_in_errors(open_page: OpenPage) -> None:
    page = open_page()
    page.record_traces()
    page.choose("beams", {"num_beams": 2, "max_tokens": 60})
    page.fill("others", json.dumps({"grammar": {"choice": [TEXTS[0], TEXTS[1]]}}))
    page.ask(TEXTS[3])
    assert page.answer() in TEXTS[:2]
    page.until("document.querySelector('.tree .node.best') !== null")
    labels = page.page.locator(".tree .token").all_text_contents()
    assert any("<" in one for one in labels)
    page.fill("others", json.dumps({TEXTS[0]: 1}))
    page.ask("Hello")
    assert TEXTS[0] in (page.page.locator(".notice:visible").text_content() or "")
    kinds = page.page.evaluate("[...document.querySelectorAll('.transcript *')].map(one => one.localName)")
    assert set(kinds) <= KINDS
    page.check()
