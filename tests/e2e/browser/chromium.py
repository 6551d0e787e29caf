"""Debian's Chromium, headless, with pages that record their errors."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

# Its own network traffic and messages are disabled: all that a test sees is the page's own.
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE = 60_000  # ms: on a busy machine what is sure to come may come late
expect.set_options(timeout=PATIENCE)
NEEDED = (
    "Debian's chromium must be installed: apt-get install --no-install-recommends chromium fonts-dejavu-core"
)
# Runs in every frame before anything else: notes what the policy refused, and when a picture first stood.
WATCH = """
(() => {
    window.refused = [];
    document.addEventListener("securitypolicyviolation", event => {
        window.refused.push(`${event.violatedDirective} ${event.blockedURI}`);
    });
    new MutationObserver((changes, watcher) => {
        if (document.querySelector("[data-node]") === null) return;
        watcher.disconnect();
        requestAnimationFrame(() => setTimeout(() => { window.drawn = performance.now(); }));
    }).observe(document, {childList: true, subtree: true});
})();
"""


@contextmanager
def started() -> Iterator[Browser]:
    """A browser; without one a test fails in CI and is skipped elsewhere."""
    program = shutil.which("chromium")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(NEEDED, pytrace=False)
        pytest.skip(NEEDED)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Sheet:
    """An open page, and its messages, errors, requests and refused requests."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, path: Path) -> Sheet:
        """Go to a file; it is open when a picture of it has been drawn."""
        self.page.goto(path.as_uri())
        if path.suffix == ".html":
            self.until("window.drawn !== undefined")
        return self

    def until(self, condition: str) -> None:
        """Wait until it holds, polled from outside: a page's policy forbids playwright's own waiting."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"never came true: {condition}"
            self.page.wait_for_timeout(20)

    def check(self) -> None:
        """Assert that it was quiet: no message, no request but the file itself, nothing refused."""
        assert self.said == []
        assert [url for url in self.asked if url != self.page.url.partition("#")[0]] == []
        refused = [frame.evaluate("window.refused") for frame in self.page.frames]
        assert [one for one in refused if one] == []


def sheet(context: BrowserContext) -> Sheet:
    """A new page whose every word is noted."""
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    found = Sheet(page)
    page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.said.append(f"thrown: {error}"))
    page.on("request", lambda request: found.asked.append(request.url))
    page.on("dialog", lambda dialog: (found.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("popup", lambda other: found.said.append(f"popup: {other.url}"))
    page.on("download", lambda one: found.said.append(f"download: {one.url}"))
    return found


def options(width: int = 1280, height: int = 800, **given: Any) -> dict[str, Any]:
    """A context without a network, in which steps do not glide."""
    return {
        "viewport": {"width": width, "height": height},
        "offline": True,
        "reduced_motion": "reduce",
        "locale": "en-GB",
        **given,
    }
