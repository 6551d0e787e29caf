"""The views of a text on small traces made by hand: their figures, and their text if little was kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from descant.trace.pictures import text as text_stats
from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenShift,
    TokenTexts,
    TraceHeader,
    TraceRecord,
)
from descant.trace.trace import Trace
from tests.e2e.browser.chromium import Sheet

Open = Callable[..., Sheet]
WORDS = (" one", " two", " three", " four", " five", "\n", "    ")
PROMPT = (0, 1)


def look(token: int, raw: float, left: float | None = None) -> ChoiceRecord:
    """A choice that gave a token one probability, and its processor another; None: it had no processor."""
    other = (token + 1) % len(WORDS)
    if left is None:
        top = (CandidateRecord(token, math.log(raw), math.log(raw)), CandidateRecord(other, -4.0, -4.0))
        return ChoiceRecord(1.0 + raw, 1.0 + raw, top)
    top = (CandidateRecord(token, math.log(raw), math.log(left)), CandidateRecord(other, -4.0, -math.inf))
    moved = (TokenShift(token, math.log(raw), math.log(left)), TokenShift(other, -4.0, -math.inf))
    return ChoiceRecord(1.0 + raw, left, top, (ProcessorRecord("Cutter", 1, 6, 0.25, moved),))


def trace(steps: Sequence[RowRecord], said: Sequence[int], leaf: int, **asked: object) -> Trace:
    """One request of those rows, one a step."""
    return Trace(records(steps, ReturnedSequence(tuple(said), "length", leaf), asked))


def records(
    steps: Sequence[RowRecord], said: ReturnedSequence, asked: dict[str, object]
) -> Iterator[TraceRecord]:
    yield TraceHeader("0", "Handmade", len(WORDS), 8, 4_000_000)
    yield TokenTexts(dict(enumerate(WORDS)))
    yield RequestRecord(0, 0, PROMPT, "by hand", **asked)  # type: ignore[arg-type]
    for place, row in enumerate(steps):
        yield StepRecord(place, 0.01, (row,))
    yield ResultRecord(0, (said,))


def trace_of(tokens: Sequence[int], looks: Sequence[ChoiceRecord | None]) -> Trace:
    """A token a step."""
    rows = [
        RowRecord(0, place, looks=() if seen is None else (seen,), runs=(RunRecord((token,), (place + 1,)),))
        for place, (token, seen) in enumerate(zip(tokens, looks, strict=True))
    ]
    return trace(rows, tokens, len(tokens), stages=("Cutter", "Idler"))


@pytest.fixture
def shown(sheet: Open, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """`shown(trace, view)`: the page of a trace, opened at a view; nothing may go wrong in it."""
    opened: list[Sheet] = []

    def show(one: Trace, view: str, beside: Trace | None = None) -> Page:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(one.html(beside=beside), encoding="utf-8")
        opened.append(sheet(path))
        opened[-1].page.locator(f"#tab-{view}").click()
        return opened[-1].page

    yield show
    for one in opened:
        one.check()


def shades(page: Page) -> list[str | None]:
    return [one.get_attribute("data-shade") for one in page.locator("#view-text .flow .tok").all()]


def figure(page: Page, name: str) -> str | None:
    return page.locator(f"section:visible [data-figure={name}]").text_content()


# ------------------------------------------------------------------------ the text
CHANCES = (0.95, 0.91, 0.89, 0.51, 0.49, 0.1, 0.01)


def test_figures_and_shades_are_those_of_the_other_pictures(shown: Callable[..., Page]) -> None:
    told = trace_of([2] * len(CHANCES), [look(2, chance) for chance in CHANCES])
    page = shown(told, "text")
    nodes = told.tree.path_to(len(CHANCES))
    perplexity, entropy = text_stats.perplexity(nodes), text_stats.mean_entropy(nodes)
    assert perplexity is not None
    assert entropy is not None
    assert (figure(page, "tokens"), figure(page, "perplexity")) == ("7", f"{perplexity:.2f}")
    assert figure(page, "entropy") == f"{entropy:.2f}"
    assert page.locator("#view-text [data-figure=left]").count() == 0  # nothing was changed
    assert (
        shades(page)
        == [str(text_stats.shade_level(node)) for node in nodes]
        == ["0", "0", "1", "1", "2", "3", "4"]
    )
    expect(page.get_by_role("radiogroup", name="Shade by")).to_be_hidden()


def test_shades_by_either_probability(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2, 3], [look(2, 0.01, 0.95), look(3, 0.6, 0.3)]), "text")
    assert shades(page) == ["4", "1"]
    page.get_by_role("radio", name="As processed").check()
    assert shades(page) == ["0", "2"]


def test_tokens_of_which_nothing_was_kept(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2, 3, 6], [look(2, 0.5), None, None]), "text")
    assert shades(page) == ["1", "none", "none"]
    assert figure(page, "perplexity") == "2.00"
    page.locator("#view-text .flow .tok").nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("was not kept")
    assert page.locator("#view-text .flow .tok").nth(2).get_attribute("aria-label") == "4 spaces"


def test_lines_end_after_the_last_of_several_newlines(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2, 5, 5, 3], [look(token, 0.5) for token in (2, 5, 5, 3)]), "text")
    tops = [one.bounding_box() for one in page.locator("#view-text .flow .tok .ink").all()]
    lines = [round(box["y"]) for box in tops if box is not None]
    assert lines[0] == lines[1] == lines[2] < lines[3]


def test_what_was_taken_back_is_struck(shown: Callable[..., Page]) -> None:
    rows = [
        RowRecord(0, 0, looks=(look(2, 0.5),), runs=(RunRecord((2,), (1,)),)),
        RowRecord(0, 1, looks=(look(3, 0.5),), runs=(RunRecord((3,), (2,)),)),
        RowRecord(0, 2, looks=(look(4, 0.5),), runs=(RunRecord((4,), (3,), back=1),)),
    ]
    page = shown(trace(rows, (2, 4), 3), "text")
    assert page.locator("#view-text .flow del").text_content() == "four"
    assert page.locator("#view-text .flow").text_content() == " three four five"


def test_a_token_that_is_chosen_brings_its_step(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2, 3, 4], [look(token, 0.5, 0.9) for token in (2, 3, 4)]), "text")
    page.locator("#view-text .flow .tok").nth(1).click()
    expect(page.locator("#view-text .flow .tok[aria-selected=true]")).to_have_text(" four")
    page.locator("#tab-processors").click()
    assert page.locator("#step").input_value() == "1"
    assert page.locator("#view-processors .context .taken").text_content() == "·four"


# ------------------------------------------------------------------------ processors
def test_a_cut_token_is_struck_and_the_taken_one_marked(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2], [look(2, 0.5, 0.9)]), "processors")
    kinds = [one.get_attribute("data-panel") for one in page.locator("#view-processors .panel").all()]
    assert kinds == ["raw", "stage", "left"]
    cut = page.locator(".panel.stage .bar.cut")
    assert [one.get_attribute("data-token") for one in cut.all()] == ["3"]
    assert cut.locator(".word").evaluate("one => getComputedStyle(one).textDecorationLine") == "line-through"
    assert [one.get_attribute("data-token") for one in page.locator(".panel.stage .taken").all()] == ["2"]
    expect(page.locator("#view-processors")).to_contain_text("Changed nothing here: Idler.")


def test_without_a_change_the_models_own_is_shown(shown: Callable[..., Page]) -> None:
    page = shown(trace_of([2], [look(2, 0.5)]), "processors")
    assert [one.get_attribute("data-panel") for one in page.locator(".panel").all()] == ["raw"]
    expect(page.locator("[data-none]")).to_contain_text("No processor changed anything here (Cutter, Idler)")


def test_a_step_that_chose_nothing_shows_the_one_before(shown: Callable[..., Page]) -> None:
    rows = [
        RowRecord(0, 0, looks=(look(2, 0.5),), runs=(RunRecord((2,), (1,)),)),
        RowRecord(0, 1, runs=(RunRecord((), ()),)),
    ]
    page = shown(trace(rows, (2,), 1), "processors")
    expect(page.locator("#view-processors")).to_contain_text("This step chose nothing. Above is step 1.")
    assert page.locator("#view-processors .bar").count() == 2


# ------------------------------------------------------------------------ drafts, and two runs
def test_unverified_drafts_are_counted(shown: Callable[..., Page]) -> None:
    looks = (look(2, 0.5), look(3, 0.5))
    rows = [
        RowRecord(0, 0, looks=looks, drafts=(2, 4, 4, 4), runs=(RunRecord((2, 3), (1, 2)),)),
        RowRecord(0, 2, looks=(look(4, 0.5),), runs=(RunRecord((4,), (3,)),)),
    ]
    page = shown(trace(rows, (2, 3, 4), 3, drafter="Somebody"), "speculation")
    names = ("forwards", "tokens", "per-forward", "rate")
    assert [figure(page, name) for name in names] == ["2", "3", "1.50", "25.0 %"]
    expect(page.locator(".flow [data-accepted='1']")).to_have_text("three")
    assert page.locator(".flow [data-rest]").get_attribute("data-rest") == "2"
    page.locator(".flow .own .ink").first.hover()
    expect(page.locator("#tip")).to_contain_text("Guessed instead: ·five")


def test_a_draft_that_ended_the_text_was_accepted(shown: Callable[..., Page]) -> None:
    rows = [
        RowRecord(
            0, 0, looks=(look(2, 0.5), look(3, 0.5)), drafts=(2, 3, 4), runs=(RunRecord((2, 3), (1, 2)),)
        )
    ]
    page = shown(trace(rows, (2, 3), 2, drafter="Somebody"), "speculation")
    assert figure(page, "rate") == "66.7 %"
    assert page.locator(".flow .stood").all_text_contents() == [" three", " four"]
    assert page.locator(".flow .rejected").count() == 0


def test_runs_of_which_one_is_the_beginning_of_the_other(shown: Callable[..., Page]) -> None:
    one = trace_of([2], [look(2, 0.5)])
    other = trace_of([2, 4], [look(2, 0.5), look(4, 0.5)])
    page = shown(one, "beside", other)
    assert page.locator("[data-shared]").get_attribute("data-shared") == "1"
    assert page.locator(".half[data-run='0'] .parts").count() == 0
    assert page.locator(".half[data-run='1'] .parts").text_content() == " five"
    assert page.locator("[data-name=Tokens] td").all_text_contents() == ["1", "2"]
