"""The tree of a search: it grows while it is searched, stays bounded, and ends as the trace says."""

from __future__ import annotations

from typing import Any

from tests.e2e.serve_page.conftest import KEY, OpenPage
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

MAX_LEVELS, MAX_NODES = 60, 400
DRAW = """
async records => {
    const { TreeView } = await import(new URL("page/tree_view.js", location));
    window.tree = new TreeView();
    document.getElementById("transcript").append(window.tree.element);
    window.tree.tree.add(records);
    window.tree.draw();
}
"""
SEEN = """
() => ({
    nodes: document.querySelectorAll(".tree [data-node]").length,
    running: document.querySelectorAll(".tree .node.running").length,
    levels: new Set([...document.querySelectorAll(".tree .node")].map(
        one => one.getAttribute("transform").match(/[0-9.]+/)[0])).size,
})
"""


def test_the_tree_grows_and_can_be_opened(open_page: OpenPage, page_server: ServerProcess) -> None:
    page = open_page()
    page.record_traces()
    page.choose("beams", {"num_beams": 3, "n": 2, "max_tokens": 16})
    page.send("Hello")
    sizes: list[int] = []
    running = 0
    while page.page.locator(".entry.busy").count():
        seen = page.page.evaluate(SEEN)
        running = max(running, seen["running"])
        sizes += [seen["nodes"]] if seen["nodes"] not in sizes else []
    assert len(sizes) > 3, "the tree came all at once"
    assert sizes == sorted(sizes)
    assert running >= 3
    assert page.page.locator(".tree .node.running").count() == 0
    assert page.page.locator(".tree .node.dropped").count() > 0

    link = page.page.get_by_role("link", name="Open the trace")
    assert link.get_attribute("target") == "_blank"
    address = str(link.evaluate("one => one.href"))
    path = address.removeprefix(page_server.url)
    answer = request(page_server.port, "GET", path, key=KEY)
    assert answer.status == 200
    assert b"<!doctype html>" in answer.body[:100]
    records = request(page_server.port, "GET", path + ".jsonl", key=KEY).body.decode().splitlines()
    assert '"kind":"result"' in records[-1]
    page.until("document.querySelectorAll('.tree .node.best').length >= 16")
    captions = page.page.locator(".tree .score").all_text_contents()
    assert sum(one.startswith("#1 ") for one in captions) == 1
    assert sum(one.startswith("#2 ") for one in captions) == 1
    page.check()


def records(beams: int, steps: int) -> list[dict[str, Any]]:
    """The records of a search whose beams go on, but for the last, which a branch of the first replaces."""
    found: list[dict[str, Any]] = [{"kind": "request", "request": 0, "root": 0, "beams": beams}]
    at = [0] * beams
    for step in range(steps):
        first = 1 + step * beams
        rows: list[dict[str, Any]] = [{"request": 0, "at": one, "slot": slot} for slot, one in enumerate(at)]
        for slot, row in enumerate(rows):
            nodes = [first + slot] if slot < beams - 1 else []
            row["runs"] = [{"tokens": [5], "nodes": [node], "slot": slot, "score": -1.0} for node in nodes]
        rows[0]["runs"].append(
            {"tokens": [6], "nodes": [first + beams - 1], "slot": beams - 1, "score": -2.0}
        )
        at = [first + slot for slot in range(beams)]
        found.append({"kind": "step", "step": step, "seconds": 0.1, "rows": rows})
    return found


def test_a_long_search_is_drawn_in_part(open_page: OpenPage) -> None:
    page = open_page()
    page.page.evaluate(DRAW, records(4, 300))
    seen = page.page.evaluate(SEEN)
    assert seen == {"nodes": 4 * MAX_LEVELS, "running": seen["running"], "levels": MAX_LEVELS}
    assert page.page.locator(".tree .node.running").count() >= 4
    facts = page.page.locator(".tree-facts").text_content()
    assert facts == "300 steps, 1200 nodes, 4 beams running, shown from token 241 on"
    assert page.page.evaluate("window.tree.tree.nodes.size") <= 4 * (MAX_LEVELS + 1)

    # It shows its end, until somebody pans elsewhere.
    window = page.page.locator(".tree-window")
    assert window.evaluate("one => one.scrollLeft + one.clientWidth >= one.scrollWidth - 2")
    box = window.bounding_box()
    assert box is not None
    before = window.evaluate("one => one.scrollLeft")
    page.page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 250, box["y"] + 50)
    page.page.mouse.up()
    assert window.evaluate("one => one.scrollLeft") == before - 200
    page.page.evaluate("window.tree.draw()")
    assert window.evaluate("one => one.scrollLeft") == before - 200
    page.check()


def test_a_wide_search_is_drawn_in_part(open_page: OpenPage) -> None:
    page = open_page()
    page.page.evaluate(DRAW, records(48, 20))
    assert page.page.evaluate(SEEN)["nodes"] == MAX_NODES // 48 * 48
    page.check()


def test_a_stopped_search_no_longer_runs(open_page: OpenPage) -> None:
    page = open_page()
    page.record_traces()
    page.choose("beams", {"num_beams": 2, "max_tokens": 2000})
    page.send("Hello")
    page.until("document.querySelectorAll('.tree [data-node]').length > 6")
    facts = page.page.locator(".tree-facts")
    assert "2 beams running" in (facts.text_content() or "")
    page.page.locator("#stop").click()
    page.wait_for_end()
    assert "running" not in (facts.text_content() or "")
    assert page.page.locator(".tree [data-node]").count() > 6
    page.check()
