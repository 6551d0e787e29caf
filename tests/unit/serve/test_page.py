"""The files of the page, and who gets them."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

import descant.serve.routes.service as page_routes
from descant.serve.http.errors import ApiError
from descant.serve.routes.service import show_page, show_page_asset

ASSETS = page_routes._assets()
SCRIPTS = sorted(name for name in ASSETS if name.endswith(".js"))


def http(name: str = "", *, page: bool = True, traces: int = 0) -> Any:
    model = SimpleNamespace(settings=SimpleNamespace(page=page, traces=traces))
    app = SimpleNamespace(state=SimpleNamespace(model=model))
    return SimpleNamespace(app=app, path_params={"name": name})


def test_a_server_without_the_page_has_no_such_path() -> None:
    for route, name in ((show_page, ""), (show_page_asset, "app.js")):
        assert asyncio.run(route(http(name))).status_code == 200
        with pytest.raises(ApiError) as caught:
            asyncio.run(route(http(name, page=False)))
        assert (caught.value.status, caught.value.code) == (404, "not_found")


@pytest.mark.parametrize(("traces", "shown"), [(0, "false"), (3, "true")])
def test_the_page_knows_whether_there_are_traces(traces: int, shown: str) -> None:
    body = bytes(asyncio.run(show_page(http(traces=traces))).body).decode()
    assert f'data-has-traces="{shown}"' in body
    assert "{{" not in body


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', ASSETS["index.html"].decode()))
    for name in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', ASSETS[name].decode()))
    assert named | {"index.html"} == set(ASSETS)


def test_nothing_inside_of_the_page_needs_a_wider_policy() -> None:
    text = ASSETS["index.html"].decode()
    assert re.findall(r"<script(?![^>]*src=)|<style|\bon[a-z]+=|\bstyle=|https?:|//", text) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_turns_text_into_markup(name: str) -> None:
    text = ASSETS[name].decode()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function"
    assert re.findall(forbidden, text) == []
    assert len(text.splitlines()) <= 400
