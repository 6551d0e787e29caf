"""The data of a page: the whole trace, and nothing else."""

from __future__ import annotations

import json
import math

import pytest

from descant.trace.pictures.page import DetailLevel, build_page_data
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
    TokenTexts,
    TraceHeader,
)
from descant.trace.trace import Trace
from descant.trace.trace_data import token_pieces
from tests.unit.trace import fakes

SIZES = [
    {"count": 1, "steps": 9},
    {"count": 4, "steps": 12, "demands": 3},
    {"count": 6, "steps": 10, "groups": 3},
    {"count": 3, "steps": 7, "requests": 3},
]
# Column -> attribute of a node.
COLUMNS = {
    **{
        name: name
        for name in ("number", "depth", "slot", "group", "raw", "processed", "score", "met", "state")
    },
    "born": "step",
    "left": "dropped_step",
    "reason": "reason",
    "rank": "rank",
}


def page_data_of(trace: Trace, detail: DetailLevel | None = None) -> dict:
    """The scene of a trace, through JSON."""
    return json.loads(json.dumps(build_page_data(trace, detail=detail), allow_nan=False))


def drafted() -> Trace:
    """Drafts of which one stood, a token that was taken back, and no end."""
    never = CandidateRecord(9, -math.inf, -math.inf)
    looks = tuple(ChoiceRecord(1.0, 0.5, (CandidateRecord(5 + at, -0.5, -0.25), never)) for at in range(3))
    return Trace(
        [
            TraceHeader("0", "Invented", 20, 2, 4000),
            TokenTexts({5: "a", 6: "b"}),
            RequestRecord(3, 0, (1, 2), "greedy search", drafter="PromptLookup"),
            StepRecord(0, 0.1, (RowRecord(3, 0, 0, looks[:2], (5, 8), (RunRecord((5, 6), (1, 2)),)),)),
            StepRecord(1, 0.1, (RowRecord(3, 2, 0, looks[2:], (), (RunRecord((7,), (3,), back=1),)),)),
        ]
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_columns_are_the_tree(size: dict, seed: int) -> None:
    trace = fakes.beams(**size, seed=seed)
    for request in page_data_of(trace)["runs"][0]["requests"]:
        nodes = sorted(trace.tree.request_nodes(request["request"]), key=lambda node: node.number)
        columns = request["nodes"]
        for name, attribute in COLUMNS.items():
            assert columns[name] == [getattr(node, attribute) for node in nodes], name
        assert columns["token"] == [-1 if node.token is None else node.token for node in nodes]
        assert columns["guessed"] == [int(node.is_draft) for node in nodes]
        numbers = columns["number"]
        parents = [None if at < 0 else numbers[at] for at in columns["parent"]]
        assert parents == [node.parent for node in nodes]
        for node, place in zip(nodes, columns["look"], strict=True):
            assert (place < 0) == (node.choice is None)
            if node.choice is not None:
                assert request["looks"][place]["top"] == [list(one) for one in node.choice.top]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_steps_and_sequences_are_those_of_the_trace(size: dict) -> None:
    trace = fakes.beams(**size)
    for request in page_data_of(trace)["runs"][0]["requests"]:
        numbers, tokens = request["nodes"]["number"], request["nodes"]["token"]
        steps = [one for one in trace.steps if one.rows[0].request == request["request"]]
        assert [one["step"] for one in request["steps"]] == [one.step for one in steps]
        for one, step in zip(request["steps"], steps, strict=True):
            assert (one["seconds"], one["cache"]) == (step.seconds, step.cache)
            assert [numbers[row["at"]] for row in one["rows"]] == [row.at for row in step.rows]
            assert [len(row["looks"]) for row in one["rows"]] == [len(row.looks) for row in step.rows]
        result = trace.results[request["request"]]
        for said, one in zip(result.sequences, request["said"], strict=True):
            assert tuple(tokens[at] for at in one["nodes"]) == said.tokens
            assert (one["reason"], one["score"]) == (said.reason, said.score)


def test_texts_are_pieces_that_are_safe_to_show() -> None:
    words = (*fakes.WORDS[:-1], "<b>", "\udce4", "\u202e", "é", "<|end|>")
    trace = fakes.beams(4, 12, seed=5, words=words)
    run = page_data_of(trace)["runs"][0]
    assert run["special"] == [len(words) - 1]
    for token, pieces in run["texts"].items():
        assert pieces == [list(one) for one in token_pieces(trace, int(token))]
    assert not any(one in json.dumps(run, ensure_ascii=False) for one in "\u202e\udce4")
    met = {token for one in run["requests"] for token in one["nodes"]["token"]} - {-1}
    assert {str(token) for token in met} <= run["texts"].keys()


def test_drafts_what_was_taken_back_and_a_run_that_goes_on() -> None:
    (request,) = page_data_of(drafted())["runs"][0]["requests"]
    first, second = (one["rows"][0] for one in request["steps"])
    assert (first["drafts"], first["accepted"]) == ([5, 8], 1)
    assert (second["drafts"], second["accepted"]) == ([], 0)
    ended = RowRecord(3, 0, 0, (), (5, 8), (RunRecord((5, 8), (4, 5), reason="eos"),))
    trace = Trace([*drafted().records[:3], StepRecord(0, 0.1, (ended,))])
    assert page_data_of(trace)["runs"][0]["requests"][0]["steps"][0]["rows"][0]["accepted"] == 2
    assert request["nodes"]["guessed"] == [0, 1, 0, 0]
    assert request["nodes"]["parent"] == [-1, 0, 1, 1]
    assert request["nodes"]["state"][1:] == ["alive", "dropped", "alive"]
    assert [one["nodes"] for one in request["said"]] == [[1, 3]]
    assert request["looks"][0]["top"][1] == [9, None, None]  # the logarithm of zero


def test_every_other_text_is_spelt_out() -> None:
    bad, good = "<i>\u202e\u200b", "<i>‹U+202E›‹U+200B›"
    deep: list = []
    for _ in range(50):
        deep = [deep]
    config = {bad: [bad, {bad: 1}], "deep": deep, "long": "x" * 5000}
    look = ChoiceRecord(1.0, 1.0, (CandidateRecord(1, 0.0, 0.0),), (ProcessorRecord(bad, 1),))
    trace = Trace(
        [
            TraceHeader(bad, bad, 2, 1, 400),
            RequestRecord(0, 0, (1,), bad, config, (bad,), drafter=bad),
            StepRecord(0, 0.1, (RowRecord(0, 0, 0, (look,), (), (RunRecord((1,), (1,), reason=bad),)),)),
            ResultRecord(0, (ReturnedSequence((1,), bad, 1),), error=bad),
        ]
    )
    made = build_page_data(trace, title=bad)
    request = made["runs"][0]["requests"][0]
    assert request["config"][good] == [good, {good: 1}]
    assert 990 < len(request["config"]["long"]) < 1010
    assert (made["title"], made["runs"][0]["model"], request["method"]) == (good, good, good)
    assert (request["error"], request["said"][0]["reason"], request["drafter"]) == (good, good, good)
    assert request["looks"][0]["stages"][0]["name"] == request["stages"][0] == good
    assert "\u202e" not in json.dumps(made, ensure_ascii=False)


def test_less_detail_keeps_what_was_taken() -> None:
    trace = fakes.guesses()
    whole, less = (
        page_data_of(trace),
        page_data_of(trace, DetailLevel(max_candidates=0, with_processors=False, max_prompt_tokens=1)),
    )
    (before,), (after,) = whole["runs"][0]["requests"], less["runs"][0]["requests"]
    assert before["nodes"] == after["nodes"]
    assert sum(len(one["top"]) for one in after["looks"]) < sum(len(one["top"]) for one in before["looks"])
    for token, place in zip(after["nodes"]["token"], after["nodes"]["look"], strict=True):
        assert place < 0 or token in {one[0] for one in after["looks"][place]["top"]}
    assert all(one["stages"] for one in before["looks"])
    assert not any(one["stages"] for one in after["looks"])
    assert (after["prompt"], after["unshown"]) == (before["prompt"][-1:], 1)


def test_fewer_steps_and_requests_leave_a_whole_tree() -> None:
    trace = fakes.beams(3, 12, requests=3)
    requests = page_data_of(trace, DetailLevel(with_choices=False, max_steps=5, max_requests=2))["runs"][0][
        "requests"
    ]
    assert [one["request"] for one in requests] == [0, 1]
    for one in requests:
        assert len(one["steps"]) == 5
        assert max(one["nodes"]["depth"]) == 5
        assert one["looks"] == []
        assert set(one["nodes"]["look"]) == {-1}
        count = len(one["nodes"]["number"])
        assert all(at < count for at in one["nodes"]["parent"])
        assert all(at < count for said in one["said"] for at in said["nodes"])
