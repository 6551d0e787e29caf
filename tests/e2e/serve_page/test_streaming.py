"""Conversations and continuations: they grow as they come, stop when told to, and go on."""

from __future__ import annotations

import time

from tests.e2e.serve_page.conftest import KEY, OpenPage
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

CANCELLED = "descant_engine_cancelled_total"


def test_text_grows_and_is_what_the_server_says(open_page: OpenPage, page_server: ServerProcess) -> None:
    page = open_page()
    assert page.page.locator("#model").text_content() == "smol-draft"
    page.choose("greedy", {"max_tokens": 40})
    page.send("Tell me of the sea.")
    lengths = set()
    while page.page.locator(".entry.busy").count():
        lengths.add(len(page.answer()))
    assert len(lengths) > 3, "the text came all at once"
    assert page.page.evaluate("document.querySelectorAll('.flow .tok[data-shade]').length") >= 40
    body = {**page.bodies[-1], "stream": False, "stream_options": None}
    whole = request(page_server.port, "POST", "/v1/chat/completions", body, key=KEY).json
    assert page.answer() == whole["choices"][0]["message"]["content"]
    assert "40 tokens" in (page.page.locator(".facts").text_content() or "")
    page.check()


def test_stop_cancels_and_the_conversation_goes_on(open_page: OpenPage, page_server: ServerProcess) -> None:
    page = open_page()
    cancelled = page_server.metric(CANCELLED, KEY)
    page.choose("greedy", {"max_tokens": 4000})
    entry = page.send("Count.")
    page.until("document.querySelectorAll('.flow .tok').length > 5")
    page.page.locator("#stop").click()
    deadline = time.monotonic() + 30
    while page_server.metric(CANCELLED, KEY) != cancelled + 1:
        assert time.monotonic() < deadline, "the server has not cancelled it"
    page.wait_for_end()
    stopped = page.answer()
    assert stopped
    assert "stopped" in (entry.locator(".facts").text_content() or "")

    page.fill("max_tokens", 4)
    page.fill("system", "Be brief.")
    page.ask("Go on.")
    roles = [(one["role"], one["content"]) for one in page.bodies[-1]["messages"]]
    assert roles == [
        ("system", "Be brief."), ("user", "Count."), ("assistant", stopped), ("user", "Go on."),
    ]  # fmt: skip
    page.page.locator("#clear").click()
    assert page.page.locator(".entry").count() == 0
    page.ask("Anew.")
    assert [one["content"] for one in page.bodies[-1]["messages"]] == ["Be brief.", "Anew."]
    page.check()


def test_a_continuation_is_run_by_key_copied_and_run_again(open_page: OpenPage) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.set_mode("completion")
    page.choose("greedy", {"max_tokens": 5})
    page.page.locator("#input").fill("The tide")
    page.page.keyboard.press("Enter")  # a line, not the end of the prompt
    page.page.keyboard.press("Control+Enter")
    page.wait_for_end()
    first = page.answer()
    assert page.bodies[-1]["prompt"] == "The tide\n"
    page.page.get_by_role("button", name="Copy").click()
    page.until("document.querySelector('.actions').textContent.includes('Copied')")
    assert page.page.evaluate("navigator.clipboard.readText()") == first
    page.page.get_by_role("button", name="Again").click()
    page.wait_for_end()
    assert page.page.locator(".entry").count() == 1
    assert page.answer() == first
    page.set_mode("chat")
    assert page.page.locator(".entry:visible").count() == 0
    page.check()


def test_a_server_that_is_gone_is_reported(open_page: OpenPage) -> None:
    page = open_page()
    page.page.context.set_offline(True)
    page.ask("Anybody?")
    assert page.page.locator(".notice").text_content() == "Failed. the server cannot be reached"
    assert page.page.locator("#input").input_value() == "Anybody?"
    page.page.context.set_offline(False)
    page.choose("greedy", {"max_tokens": 3})
    page.ask("Anybody?")
    assert page.page.locator(".entry").count() == 1  # the failed one has gone
    assert page.answer()
