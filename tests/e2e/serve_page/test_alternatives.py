"""The alternatives of each token, by pointer, keys and touch."""

from __future__ import annotations

import math

from tests.e2e.serve_page.conftest import KEY, OpenPage
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

OWL = "日本 🦉 é done"  # several tokens make one of these characters


def test_alternatives_by_pointer_and_keys(open_page: OpenPage, page_server: ServerProcess) -> None:
    page = open_page()
    page.choose("greedy", {"max_tokens": 6})
    page.ask("Hello")
    body = {**page.bodies[-1], "stream": False, "stream_options": None}
    whole = request(page_server.port, "POST", "/v1/chat/completions", body, key=KEY).json
    entries = whole["choices"][0]["logprobs"]["content"]
    popover = page.page.locator("#alternatives")
    page.page.locator(".flow .tok .ink").nth(1).hover()
    assert popover.is_visible()
    shares = popover.locator(".share").all_text_contents()
    likeliest = [math.exp(one["logprob"]) for one in entries[1]["top_logprobs"]]
    assert len(shares) == 5
    for shown, share in zip(shares, likeliest, strict=True):
        assert abs(float(shown.removesuffix(" %").removeprefix("< ")) - 100 * share) < 0.06
    assert popover.locator(".chosen").count() == 1
    page.page.keyboard.press("Escape")
    assert not popover.is_visible()

    page.page.mouse.move(2, 2)
    page.page.locator(".flow").focus()
    for place in range(3):
        page.page.keyboard.press("ArrowRight")
        assert page.page.locator(".flow .tok").nth(place).evaluate("one => one.classList.contains('shown')")
    assert popover.is_visible()
    assert "%" in (page.page.locator("#said").text_content() or "")
    page.page.locator("#input").focus()
    assert not popover.is_visible()
    page.check()


def test_alternatives_by_touch(open_page: OpenPage) -> None:
    page = open_page(width=390, height=700, has_touch=True, is_mobile=True)
    page.page.locator("#fold").click()
    page.choose("greedy", {"max_tokens": 6})
    page.ask("Hello")
    popover = page.page.locator("#alternatives")
    page.page.locator(".flow .tok .ink").nth(2).tap()
    assert popover.is_visible()
    box = popover.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.page.locator(".flow .tok .ink").nth(2).tap()
    assert not popover.is_visible()
    page.check()


def test_tokens_of_one_character_are_one(open_page: OpenPage) -> None:
    for mode in ("chat", "completion"):
        page = open_page()
        page.set_mode(mode)
        page.choose("greedy", {"max_tokens": 60})
        page.set_grammar("choice", OWL)
        page.ask("Say it")
        assert page.answer() == OWL
        parts = page.page.locator(".flow .tok").all_text_contents()
        assert any("🦉" in one for one in parts)
        assert not any("\ufffd" in one for one in parts)
        page.page.locator(".flow .tok:has-text('🦉') .ink").hover()
        said = page.page.locator("#alternatives").text_content() or ""
        assert "tokens make this character" in said
        page.check()
