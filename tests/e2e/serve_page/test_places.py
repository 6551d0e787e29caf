"""Phones, the dark, keys and proxies."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Route

from tests.e2e.serve_page.conftest import KEY, ROOT_PATH, OpenPage
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

SCROLLS = "document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_horizontal_scroll(open_page: OpenPage, scheme: str) -> None:
    page = open_page(width=360, height=640, has_touch=True, is_mobile=True, color_scheme=scheme)
    assert not page.page.evaluate(SCROLLS)
    page.page.locator("#fold").click()
    assert page.page.locator("#settings").is_visible()
    for section in page.page.locator("details.section:visible").all():
        section.evaluate("one => { one.open = true; }")
    page.record_traces()
    page.choose("beams", {"num_beams": 3, "n": 2, "max_tokens": 12})
    assert not page.page.evaluate(SCROLLS)
    page.ask("w" * 300 + "\n" + "m " * 50)
    assert page.page.locator(".tree").is_visible()
    assert not page.page.locator("#settings").is_visible()  # sending folds it
    assert not page.page.evaluate(SCROLLS)
    inner = page.page.locator(".transcript").evaluate("one => one.scrollWidth - one.clientWidth")
    assert inner == 0
    dark = page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 25)"
    assert dark == (scheme == "dark")
    page.check()


def test_every_control_has_a_name(open_page: OpenPage) -> None:
    page = open_page()
    page.choose("beams", {"num_beams": 2, "n": 2, "max_tokens": 3})
    page.ask("Hello")
    unnamed = page.page.evaluate(
        """
        [...document.querySelectorAll("button, input, select, textarea, a, [tabindex]")]
            .filter(one => one.tabIndex >= 0 && one.checkVisibility())
            .filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length))
            .map(one => one.outerHTML)
        """
    )
    assert unnamed == []


def test_the_key_is_asked_for_and_not_kept(open_page: OpenPage, page_server: ServerProcess) -> None:
    for path in ("/", "/page/app.js"):
        answer = request(page_server.port, "GET", path)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
    page = open_page()
    page.choose("greedy", {"max_tokens": 3})
    page.ask("Hello")
    assert page.answer()
    assert KEY not in page.page.evaluate(
        "JSON.stringify({...localStorage}) + document.cookie + location.href"
    )
    page.check()


def test_a_proxy_may_publish_it_at_a_path(open_page: OpenPage, page_server: ServerProcess) -> None:
    outside = []

    def forward(route: Route) -> None:
        path = urlsplit(route.request.url).path
        if path.startswith(ROOT_PATH + "/"):
            route.continue_(url=page_server.url + path.removeprefix(ROOT_PATH))
        else:
            outside.append(path)
            route.abort()

    page = open_page(path=ROOT_PATH + "/", forward=forward)
    page.record_traces()
    page.choose("greedy", {"max_tokens": 4})
    entry = page.ask("Hello")
    assert page.answer()
    assert outside == []
    href = entry.get_by_role("link", name="Open the trace").evaluate("one => one.href")
    assert urlsplit(str(href)).path.startswith(ROOT_PATH + "/traces/")
    page.check()


def test_a_server_without_traces_is_understood(open_page: OpenPage) -> None:
    error = {"message": "no traces here", "param": "trace", "code": "traces_disabled"}

    def forward(route: Route) -> None:
        if route.request.method == "POST":
            route.fulfill(status=400, json={"error": error})
        else:
            route.continue_()

    page = open_page(forward=forward)
    page.record_traces()
    page.ask("Hello")
    assert page.page.locator("#trace").is_disabled()
    assert page.page.locator("#trace-error").text_content() == "no traces here"
    assert "Refused. no traces here" in (page.page.locator(".notice").text_content() or "")
    page.ask("Hello")
    assert "trace" not in page.bodies[-1]


def test_the_browser_is_told_what_it_may_do(page_server: ServerProcess) -> None:
    answer = request(page_server.port, "GET", "/", key=KEY)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    script = request(page_server.port, "GET", "/page/app.js", key=KEY)
    assert script.headers["content-type"].startswith("text/javascript")
    for path in ("/page/index.html", "/page/..%2fsettings.py", "/page/none.js"):
        assert request(page_server.port, "GET", path, key=KEY).status == 404
