"""However a trace is shaped, reading and drawing it takes time in proportion to its size."""

from __future__ import annotations

import time

import pytest

from descant.errors import TraceError
from descant.trace.pictures.text import MAX_DRAWN_TOKENS
from descant.trace.records import (
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenTexts,
    TraceHeader,
    TraceRecord,
)
from descant.trace.trace import Trace
from descant.trace.trace_data import PICTURES

PLENTY = 20.0  # CPU seconds; what was quadratic took minutes


def head(drafter: str | None = None) -> list[TraceRecord]:
    request = RequestRecord(0, 0, (1,), "greedy search", drafter=drafter)
    return [TraceHeader("0", "Invented", 2, 1, 4_000_000), TokenTexts({0: " a", 1: "b"}), request]


def step(number: int, at: int, *runs: RunRecord, drafts: int = 0) -> StepRecord:
    return StepRecord(number, 0.01, (RowRecord(0, at, drafts=(0,) * drafts, runs=runs),))


def long_run(count: int, drafts: int = 0) -> StepRecord:
    return step(0, 0, RunRecord((0,) * count, tuple(range(1, count + 1))), drafts=drafts)


def result(leaf: int, times: int = 1) -> ResultRecord:
    return ResultRecord(0, tuple(ReturnedSequence((), "length", leaf) for _ in range(times)))


def chain(count: int) -> Trace:
    steps = [step(at, at, RunRecord((at % 2,), (at + 1,))) for at in range(count)]
    return Trace([*head(), *steps, result(count)])


def taken_back(count: int) -> Trace:
    """A long run, then many that go back over all of it."""
    again = [step(at, count, RunRecord((), (), back=count - 1)) for at in range(1, count)]
    return Trace([*head(), long_run(count), *again])


def returned_often(count: int) -> Trace:
    return Trace([*head(), long_run(count), result(count, count)])


def many_leaves(count: int) -> Trace:
    runs = [RunRecord((0,), (count + 1 + at,)) for at in range(count)]
    return Trace([*head(), long_run(count), step(1, count, *runs)])


def long_drafts(count: int) -> Trace:
    steps = [step(at, at, RunRecord((0,), (at + 1,)), drafts=count if at == 0 else 1) for at in range(count)]
    return Trace([*head("Assistant"), *steps, result(count)])


SHAPES = [chain, taken_back, returned_often, many_leaves, long_drafts]


@pytest.mark.ci_cases("taken_back", "long_drafts")
@pytest.mark.parametrize("shape", SHAPES)
def test_twenty_thousand_nodes(shape) -> None:
    trace = shape(20_000)
    began = time.process_time()
    assert len(trace.tree.nodes) >= 20_000
    trace.text("tree")
    assert len(trace.html()) < 2_000_000
    if shape is long_drafts:
        trace.svg("speculation")
    assert time.process_time() - began < PLENTY


def test_a_run_of_fifty_thousand_tokens_is_drawn() -> None:
    trace = Trace([*head("Assistant"), long_run(50_000, drafts=50_000), result(50_000)])
    began = time.process_time()
    for picture in PICTURES:
        beside = trace if picture == "beside" else None
        text = trace.text(picture, beside=beside)
        assert text
        if picture in ("text", "speculation", "beside"):
            assert f"{MAX_DRAWN_TOKENS:,}" in text
            assert text.count("a") < 3 * MAX_DRAWN_TOKENS
    assert "the last 10,000 drawn" in trace.svg("text")
    assert time.process_time() - began < 2 * PLENTY


def test_going_back_ends_where_it_did() -> None:
    count = 300
    for back in range(count + 1):
        records = [*head(), long_run(count), step(1, count, RunRecord((1,), (count + 1,), back=back))]
        node = Trace(records).tree.node(count + 1)
        assert (node.parent, node.depth) == (count - back, count - back + 1)
    with pytest.raises(TraceError, match="at most the new tokens of its row, got 301"):
        _ = Trace([*head(), long_run(count), step(1, count, RunRecord((1,), (count + 1,), back=301))]).tree


def test_the_paths_of_results_are_marked() -> None:
    forks = [step(1, 3, RunRecord((0,), (4,)), RunRecord((1,), (5,)))]
    trace = Trace([*head(), long_run(3), *forks, ResultRecord(0, result(5).sequences + result(4).sequences)])
    states = {number: node.state for number, node in trace.tree.nodes.items() if number}
    assert states == {1: "best", 2: "best", 3: "best", 4: "returned", 5: "best"}
    assert [trace.tree.node(number).rank for number in (4, 5)] == [1, 0]
