"""The tree of a trace: parents, tokens and outcomes."""

from __future__ import annotations

import pytest

from descant import Trace, TraceError
from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TraceHeader,
)

HEADER = TraceHeader("1", "Model", 50, 4, 5000)


def _look(*candidates):
    return ChoiceRecord(1.0, 1.0, tuple(CandidateRecord(*one) for one in candidates))


def _beams():
    """Two beams: the second step drops one token, ends one and leaves the rest."""
    first = (RunRecord((7,), (1,), 0, score=-0.4), RunRecord((8,), (2,), 1, score=-1.1))
    second = (
        RunRecord((9,), (3,), 0, score=-0.5),
        RunRecord((5,), (4,), 1, score=-3.4),
        RunRecord((2,), (5,), 0, score=-0.3, reason="eos"),
    )
    begun = _look((7, -0.5, -0.4), (8, -1.0, -1.1))
    going = _look((9, -0.1, -0.1), (2, -0.2, -0.2), (5, -3.0, -3.0))
    return [
        HEADER,
        RequestRecord(0, 0, (1,), "beam search, 2 beams", beams=2),
        StepRecord(0, 0.1, (RowRecord(0, 0, 0, (begun,), (), first),)),
        StepRecord(1, 0.1, (RowRecord(0, 1, 0, (going,), (), second), RowRecord(0, 2, 1))),
    ]


def test_every_token_is_a_node_with_what_is_known_of_it():
    tree = Trace(_beams()).tree
    assert [
        (node.parent, node.token, node.depth, node.step, node.dropped_step) for node in tree.request_nodes(0)
    ] == [
        (None, None, 0, -1, None),
        (0, 7, 1, 0, None),
        (0, 8, 1, 0, 1),
        (1, 9, 2, 1, None),
        (1, 5, 2, 1, None),
        (1, 2, 2, 1, 1),
    ]
    figures = [(node.raw, node.processed, node.score) for node in tree.request_nodes(0)[1:3]]
    assert figures == [(-0.5, -0.4, -0.4), (-1.0, -1.1, -1.1)]
    assert [node.state for node in tree.request_nodes(0)] == [
        "alive",
        "alive",
        "dropped",
        "alive",
        "alive",
        "ended",
    ]
    assert tree.nodes[1].children == [3, 4, 5]
    assert tree.nodes[3].choice is not None
    assert [node.token for node in tree.path_to(5)] == [7, 2]


def test_what_was_returned_is_marked_best_first():
    records = [
        *_beams(),
        ResultRecord(
            0, (ReturnedSequence((7, 2), "eos", 5, -0.3), ReturnedSequence((7, 9), "length", 3, -0.5))
        ),
    ]
    tree = Trace(records).tree
    assert [node.state for node in tree.request_nodes(0)[1:]] == [
        "best",
        "dropped",
        "returned",
        "alive",
        "best",
    ]
    assert (tree.nodes[5].rank, tree.nodes[3].rank, tree.nodes[4].rank) == (0, 1, None)


def test_tokens_taken_back_leave_and_others_come_in_their_place():
    records = [
        HEADER,
        RequestRecord(0, 0, (1,), "greedy search"),
        StepRecord(0, 0.1, (RowRecord(0, 0, runs=(RunRecord((7,), (1,)),)),)),
        StepRecord(1, 0.1, (RowRecord(0, 1, runs=(RunRecord((8,), (2,)),)),)),
        StepRecord(2, 0.1, (RowRecord(0, 2, runs=(RunRecord((), (), back=1),)),)),
        StepRecord(3, 0.1, (RowRecord(0, 1, runs=(RunRecord((9,), (3,)),)),)),
    ]
    tree = Trace(records).tree
    assert [(node.number, node.parent, node.dropped_step) for node in tree.request_nodes(0)] == [
        (0, None, None), (1, 0, None), (2, 1, 2), (3, 1, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "reason", "guessed"),
    [((4, 5, 9), None, 2), ((4, 5), "eos", 2), ((9,), None, 0), ((4,), "length", 1)],
)
def test_accepted_drafts_are_marked_the_last_one_too(tokens, reason, guessed):
    run = RunRecord(tokens, tuple(range(1, len(tokens) + 1)), reason=reason)
    asked = RequestRecord(0, 0, (1,), "greedy search", drafter="Lookup")
    tree = Trace([HEADER, asked, StepRecord(0, 0.1, (RowRecord(0, 0, drafts=(4, 5, 6), runs=(run,)),))]).tree
    assert [node.is_draft for node in tree.request_nodes(0)[1:]] == [
        place < guessed for place in range(len(tokens))
    ]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([StepRecord(0, 0.1, (RowRecord(3, 0),))], "request 3 must be running"),
        (
            [RequestRecord(0, 0, (), ""), StepRecord(0, 0.1, (RowRecord(0, 9, runs=(RunRecord((), ()),)),))],
            "node 9",
        ),
        (
            [
                RequestRecord(0, 0, (), ""),
                StepRecord(0, 0.1, (RowRecord(0, 0, runs=(RunRecord((4,), ()),)),)),
            ],
            "a node for each token",
        ),
        (
            [
                RequestRecord(0, 0, (), ""),
                StepRecord(0, 0.1, (RowRecord(0, 0, runs=(RunRecord((4,), (0,)),)),)),
            ],
            "created once",
        ),
        (
            [
                RequestRecord(0, 0, (), ""),
                StepRecord(0, 0.1, (RowRecord(0, 0, runs=(RunRecord((), (), back=2),)),)),
            ],
            "take back at most",
        ),
        ([RequestRecord(0, 0, (), ""), ResultRecord(0, (ReturnedSequence((4,), "eos", 5),))], "node 5"),
        (
            [RequestRecord(0, 0, (), ""), ResultRecord(0), StepRecord(0, 0.1, (RowRecord(0, 0),))],
            "request 0 must be running",
        ),
    ],
)
def test_what_does_not_hang_together_is_an_error(records, says):
    with pytest.raises(TraceError, match=says):
        _ = Trace([HEADER, *records]).tree
