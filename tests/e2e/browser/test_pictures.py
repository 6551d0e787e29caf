"""Every picture of real runs, opened: quiet, true to its trace, and usable by mouse, keyboard and finger."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from descant import Trace
from descant.tokenization.display import join_pieces
from descant.trace.records import RowRecord
from descant.trace.trace_data import Node, token_pieces
from tests.e2e.browser import reading
from tests.e2e.browser.chromium import Sheet
from tests.e2e.browser.runs import RUNS, Runs

Open = Callable[..., Sheet]
TREES = [name for name in RUNS if name != "beside"]


def tabs(page: Page) -> list[str]:
    """The names of the pictures that a page has."""
    return [(one.get_attribute("id") or "").removeprefix("tab-") for one in page.get_by_role("tab").all()]


def show(page: Page, name: str) -> None:
    page.locator(f"#tab-{name}").click()
    expect(page.locator(f"#view-{name}")).to_be_visible()


def scrub(page: Page, place: int) -> None:
    """Move the scrubber to a step, by its place among them."""
    page.locator("#step").evaluate(
        "(range, place) => { range.value = place; range.dispatchEvent(new Event('input')); }", place
    )


def rows(trace: Trace, request: int) -> list[list[RowRecord]]:
    """The rows of each step of a request."""
    found = [[row for row in step.rows if row.request == request] for step in trace.steps]
    return [one for one in found if one]


# ------------------------------------------------------------------------ quiet
@pytest.mark.parametrize("name", RUNS)
def test_it_opens_without_messages(name: str, runs: Runs, sheet: Open) -> None:
    opened = sheet(runs.page(name))
    found = tabs(opened.page)
    assert {"tree", "text", "processors"} <= set(found)
    assert ("speculation" in found, "beside" in found) == (name == "speculation", name == "beside")
    for one in found:
        show(opened.page, one)
    opened.check()


# ------------------------------------------------------------------------ true to the trace
def check_tree(page: Page, trace: Trace, request: int, place: int) -> None:
    """The tree on the page is the trace's as it stood after a step."""
    steps = [step for step in trace.steps if any(row.request == request for row in step.rows)]
    nodes = {one.number: one for one in trace.tree.request_nodes(request) if one.step <= steps[place].step}
    found = {int(number): one for number, one in page.evaluate(reading.TREE).items()}
    assert found.keys() == nodes.keys()
    for number, node in nodes.items():
        one = found[number]
        assert (one["token"], one["state"], one["met"]) == (node.token, node.state, node.met)
        assert one["score"] == (None if node.score is None else pytest.approx(node.score, abs=1e-4))
        if node.token is not None:
            assert node.processed is not None
            assert one["processed"] == pytest.approx(node.processed, abs=1e-4)
            assert float(one["step"].replace("−", "-")) == pytest.approx(node.processed, abs=0.0051)
            assert one["text"] == join_pieces(token_pieces(trace, node.token, mark_spaces=True))
    if place + 1 < len(steps):
        assert {number for number, one in found.items() if one["standing"]} == {
            row.at for row in rows(trace, request)[place + 1]
        }
    else:
        assert not [one for one in found.values() if one["standing"]]


@pytest.mark.parametrize("name", TREES)
def test_the_tree_is_the_one_of_the_trace(name: str, runs: Runs, sheet: Open) -> None:
    trace = runs.trace(name)
    opened = sheet(runs.page(name))
    for at, request in enumerate(trace.requests):
        if at:
            opened.page.locator("#choose-request").select_option(str(at))
        last = len(rows(trace, request)) - 1
        check_tree(opened.page, trace, request, last)
        for place in (0, last // 2):
            scrub(opened.page, place)
            check_tree(opened.page, trace, request, place)
    opened.check()


@pytest.mark.parametrize("name", TREES)
def test_the_text_is_the_generated_text(name: str, runs: Runs, sheet: Open) -> None:
    trace = runs.trace(name)
    page = sheet(runs.page(name)).page
    show(page, "text")
    for place, said in enumerate(trace.results[0].sequences):
        if place:
            page.locator("#sequence").select_option(str(place))
        nodes = trace.tree.path_to(said.leaf)
        spans = page.locator("#view-text .flow .tok")
        expect(spans).to_have_count(len(nodes))
        found = spans.evaluate_all("all => all.map(one => ({text: one.textContent, ...one.dataset}))")
        for one, node in zip(found, nodes, strict=True):
            assert node.token is not None
            assert node.raw is not None
            assert node.processed is not None
            assert (int(one["node"]), int(one["token"])) == (node.number, node.token)
            assert float(one["raw"]) == pytest.approx(node.raw, abs=1e-4)
            assert float(one["processed"]) == pytest.approx(node.processed, abs=1e-4)
            assert one["text"].replace("\n", "") == join_pieces(token_pieces(trace, node.token))
    assert [page.locator(".prompt").text_content()] != [""]


def test_processors_show_what_they_kept_and_cut(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("sampling")
    page = sheet(runs.page("sampling")).page
    show(page, "processors")
    for place in (0, 5, len(trace.steps) - 1):
        scrub(page, place)
        look = trace.steps[place].rows[0].looks[0]
        panels = page.locator("#view-processors .panel[data-stage]").evaluate_all(
            """all => all.map(one => ({...one.dataset, bars: [...one.querySelectorAll(".bar")].map(
                bar => [bar.dataset.token, bar.dataset.before, bar.dataset.after])}))"""
        )
        assert len(look.stages) >= 3
        assert [one["stage"] for one in panels] == [stage.name for stage in look.stages]
        for one, stage in zip(panels, look.stages, strict=True):
            assert (int(one["kept"]), int(one["cut"])) == (stage.kept, stage.cut)
            assert float(one["mass"]) == pytest.approx(stage.mass, abs=1e-4)
            assert [int(token) for token, _, _ in one["bars"]] == [moved.token for moved in stage.moved]
            for (_, before, after), moved in zip(one["bars"], stage.moved, strict=True):
                assert logarithm(before) == pytest.approx(moved.before, abs=1e-4)
                assert logarithm(after) == pytest.approx(moved.after, abs=1e-4)


def logarithm(text: str) -> float:
    return float(text) if text else -math.inf


def test_speculation_shows_which_drafts_were_accepted(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("speculation")
    page = sheet(runs.page("speculation")).page
    show(page, "speculation")
    guessed = [(row.drafts, row.runs[0].tokens[:-1]) for [row] in rows(trace, 0)]
    view = page.locator("#view-speculation .flow")
    stood = view.locator("[data-accepted='1']").evaluate_all("all => all.map(one => +one.dataset.token)")
    failed = view.locator("[data-accepted='0']").evaluate_all("all => all.map(one => +one.dataset.token)")
    assert stood == [token for _, taken in guessed for token in taken]
    assert failed == [drafts[len(taken)] for drafts, taken in guessed if len(taken) < len(drafts)]
    assert stood
    assert failed
    columns = page.locator("#view-speculation [data-position]").evaluate_all(
        "all => all.map(one => [+one.dataset.tried, +one.dataset.stood])"
    )
    longest = max(len(drafts) for drafts, _ in guessed)
    assert columns == [
        [sum(len(drafts) > at for drafts, _ in guessed), sum(len(taken) > at for _, taken in guessed)]
        for at in range(longest)
    ]


def test_two_runs_part_where_their_texts_do(runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page("beside")).page
    show(page, "beside")
    said = [runs.trace(name).results[0].sequences[0].tokens for name in ("beams", "beside")]
    shared = next(
        (at for at, (one, other) in enumerate(zip(*said, strict=False)) if one != other), min(map(len, said))
    )
    assert page.locator("[data-shared]").get_attribute("data-shared") == str(shared)
    for run, tokens in enumerate(said):
        found = page.locator(f".half[data-run='{run}'] .tok").evaluate_all(
            "all => all.map(one => +one.dataset.token)"
        )
        assert found == list(tokens)
    changed = page.locator("[data-table=differences] tr[data-name]").evaluate_all(
        "all => all.map(one => one.dataset.name)"
    )
    assert "length_penalty" in changed


# ------------------------------------------------------------------------ in use
def count(page: Page) -> int:
    """The step that the scrubber shows, from 1."""
    return int(re.findall(r"\d+", page.locator(".count").text_content() or "")[0])


def test_scrubbing_by_mouse(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("beams")
    page = sheet(runs.page("beams")).page
    last = len(trace.steps)
    assert count(page) == last
    box = page.locator("#step").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    middle = count(page)
    assert 1 < middle < last
    check_tree(page, trace, 0, middle - 1)
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert count(page) == 1
    check_tree(page, trace, 0, 0)
    page.get_by_role("button", name="Next step").click()
    assert count(page) == 2
    page.get_by_role("button", name="Previous step").click()
    assert count(page) == 1


def test_scrubbing_by_keyboard_is_announced(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("beams")
    page = sheet(runs.page("beams")).page
    last = len(trace.steps)
    page.get_by_role("slider", name="Step").focus()
    for key, step in (("ArrowLeft", last - 1), ("Home", 1), ("ArrowRight", 2), ("End", last)):
        page.keyboard.press(key)
        assert count(page) == step
        expect(page.locator("#live")).to_contain_text(f"step {step} of {last}")
    check_tree(page, trace, 0, last - 1)


def test_playing_goes_through_all_steps(runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page("greedy")).page
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.get_by_role("button", name="Play")).to_be_visible(timeout=60_000)
    assert count(page) == len(runs.trace("greedy").steps)


def test_tabs_by_keyboard(runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page("speculation")).page
    names = tabs(page)
    page.locator(f"#tab-{names[0]}").focus()
    for key, place in (("ArrowRight", 1), ("End", -1), ("ArrowRight", 0), ("ArrowLeft", -1), ("Home", 0)):
        page.keyboard.press(key)
        chosen = names[place]
        expect(page.locator(f"#tab-{chosen}")).to_be_focused()
        assert page.get_by_role("tab", selected=True).get_attribute("id") == f"tab-{chosen}"
        expect(page.get_by_role("tabpanel")).to_have_attribute("id", f"view-{chosen}")


def check_tip(page: Page, node: Node) -> None:
    """The tooltip shows the alternatives of a token with their numbers, and which was taken."""
    assert node.choice is not None
    expect(page.locator("#tip")).to_be_visible()
    found = page.locator("#tip tr[data-token]").evaluate_all(
        """all => all.map(one => [+one.dataset.token, one.classList.contains("taken"),
            [...one.querySelectorAll("td")].map(cell => cell.textContent)])"""
    )
    kept = {one.token: one for one in node.choice.top}
    assert {token for token, _, _ in found} == kept.keys()
    assert [token for token, marked, _ in found if marked] == [node.token]
    for token, _, cells in found:
        for said, log in zip(cells, (kept[token].raw, kept[token].processed), strict=False):
            assert percent(said) == pytest.approx(100 * math.exp(log), abs=0.051, rel=0.06)


def percent(text: str) -> float:
    """The text of a share; a cut token has none."""
    return 0.0 if text == "cut" else float(text.removeprefix("<").removesuffix("%"))


@pytest.mark.parametrize("way", ["hover", "focus", "tap"])
@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_a_token_shows_what_else_it_could_have_been(name: str, way: str, runs: Runs, sheet: Open) -> None:
    trace = runs.trace(name)
    page = sheet(runs.page(name), has_touch=way == "tap").page
    show(page, "text")
    nodes = trace.tree.path_to(trace.results[0].sequences[0].leaf)
    for place in (0, 3, len(nodes) - 1):
        token = page.locator("#view-text .flow .tok").nth(place)
        getattr(token if way == "focus" else token.locator(".word"), way)()
        check_tip(page, nodes[place])
        page.keyboard.press("Escape")
        expect(page.locator("#tip")).to_be_hidden()


def test_the_pointer_may_go_onto_the_tip(runs: Runs, sheet: Open) -> None:
    page = sheet(runs.page("sampling")).page
    show(page, "text")
    page.locator("#view-text .flow .tok .word").nth(2).hover()
    page.locator("#tip").hover()
    page.wait_for_timeout(400)
    expect(page.locator("#tip")).to_be_visible()


def test_tokens_by_keyboard(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("sampling")
    page = sheet(runs.page("sampling")).page
    show(page, "text")
    tokens = page.locator("#view-text .flow .tok")
    nodes = trace.tree.path_to(trace.results[0].sequences[0].leaf)
    tokens.first.focus()
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", -1), ("Home", 0)):
        page.keyboard.press(key)
        expect(tokens.nth(place % len(nodes))).to_be_focused()
        check_tip(page, nodes[place])


def test_the_tree_by_keyboard(runs: Runs, sheet: Open) -> None:
    trace = runs.trace("beams")
    page = sheet(runs.page("beams")).page
    page.get_by_role("tree").focus()
    best = trace.tree.path_to(trace.results[0].sequences[0].leaf)
    page.keyboard.press("Home")
    for node in best:
        page.keyboard.press("ArrowRight")
        chosen = page.locator("#tree [aria-selected=true]")
        expect(chosen).to_have_attribute("data-node", str(node.number))
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tree [aria-selected=true]")).to_have_attribute("data-node", str(best[-2].number))
