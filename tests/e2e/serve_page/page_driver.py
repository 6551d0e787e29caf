"""The page of a server in a browser: what a reader does on it, and what is seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from playwright.sync_api import Locator, Request

from tests.e2e.browser.chromium import Sheet

__all__ = ["ServedPage"]

# A browser says itself that a request was refused; the page shows why.
_REFUSED = "error: Failed to load resource: the server responded with a status of 400"


class ServedPage:
    """An open page of a server."""

    def __init__(self, sheet: Sheet, url: str) -> None:
        self.sheet, self.page, self.url = sheet, sheet.page, url
        self.bodies: list[dict[str, Any]] = []  # of the requests that it has sent
        self.page.on("request", self._note)
        self.page.goto(url)
        self.until("document.getElementById('model').textContent !== ''")

    def _note(self, request: Request) -> None:
        if request.method == "POST":
            self.bodies.append(json.loads(request.post_data or "null"))

    def until(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        self.sheet.until(condition)

    # -------------------------------------------------------------------- actions
    def choose(self, method: str, fields: Mapping[str, object] | None = None) -> None:
        """Choose a method, and fill fields of it or of sections by name."""
        self.page.locator(f".method:has([value={method}])").click()
        for name, value in (fields or {}).items():
            self.fill(name, value, method)

    def fill(self, name: str, value: object, method: str | None = None) -> None:
        """Fill a field of the settings."""
        own = self.page.locator(f"#{method}-{name}")
        control = own if method and own.count() else self.page.locator(f"#field-{name}")
        control.evaluate("one => { const box = one.closest('details'); if (box) box.open = true; }")
        if control.evaluate("one => one.localName") == "select":
            control.select_option(str(value))
        else:
            control.fill(str(value))

    def set_grammar(self, kind: str, text: str) -> None:
        """Choose the form of the output."""
        self.fill("grammar_kind", kind)
        self.fill("grammar", text)

    def set_mode(self, mode: str) -> None:
        """Change between chat and completion."""
        self.page.locator(f".segments label:has([value={mode}])").click()

    def record_traces(self) -> None:
        """Turn the trace switch on."""
        self.page.locator("label:has(#trace)").click()

    def send(self, text: str) -> Locator:
        """Send a text; returns its entry, which may still grow."""
        self.page.locator("#input").fill(text)
        self.page.locator("#send").click()
        return self.page.locator(".entry:visible").last

    def ask(self, text: str) -> Locator:
        """Send a text and wait for the end."""
        entry = self.send(text)
        self.wait_for_end()
        return entry

    def wait_for_end(self) -> None:
        """Wait until no request is under way."""
        self.until(
            "document.querySelector('.entry.busy') === null && !document.querySelector('#send').hidden"
        )

    # -------------------------------------------------------------------- what is seen
    def answer(self, index: int = 0) -> str:
        """The shown text of an answer of the last entry, special tokens left out."""
        flow = self.page.locator(".entry:visible").last.locator(".flow").nth(index)
        text: str = flow.evaluate(
            "one => { const copy = one.cloneNode(true);"
            " copy.querySelectorAll('.left-out').forEach(other => other.remove()); return copy.textContent; }"
        )
        return text

    def check(self) -> None:
        """Assert that nothing was said, refused by the policy, or asked of another server."""
        origin = "/".join(self.url.split("/")[:3])
        assert [one for one in self.sheet.said if not one.startswith(_REFUSED)] == []
        assert [url for url in self.sheet.asked if not url.startswith(origin)] == []
        assert self.page.evaluate("window.refused") == []
        assert self.page.evaluate("window.hit ?? null") is None
