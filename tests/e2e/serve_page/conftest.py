"""One server with a small model and one browser for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route

from tests.e2e.browser import chromium
from tests.e2e.serve_page.page_driver import ServedPage
from tests.support import pretrained
from tests.support.server_process import ServerProcess

KEY = "key-of-the-page-tests"
ROOT_PATH = "/some/where"
OpenPage = Callable[..., ServedPage]


# No longer than this folder: Playwright leaves an event loop running, and tests elsewhere start their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium, started once."""
    with chromium.started() as found:
        yield found


@pytest.fixture(scope="package")
def page_server() -> Iterator[ServerProcess]:
    """A server with a key and traces, which a proxy may publish at a path."""
    options = ("--traces", "4", "--root-path", ROOT_PATH, "--kv-memory", "0.5")
    with ServerProcess(
        pretrained.folder("smol-draft"), *options, env={"DESCANT_API_KEYS": f"reader={KEY}"}
    ) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, page_server: ServerProcess) -> Iterator[OpenPage]:
    """`open_page()`: the page in a context of its own, as one who has given the key to the browser.

    `forward` is a function of requests, as a proxy between; `path` is where the page is then. Other keywords
    go to the context.
    """
    contexts = []

    def opened(path: str = "/", forward: Callable[[Route], None] | None = None, **given: Any) -> ServedPage:
        known = {"offline": False, "http_credentials": {"username": "", "password": KEY}}
        context = browser.new_context(**chromium.options(**{**known, **given}))
        contexts.append(context)
        if forward is not None:
            context.route("**/*", forward)
        return ServedPage(chromium.sheet(context), page_server.url + path)

    yield opened
    for context in contexts:
        context.close()
