"""The tree of a trace: who took what after whom, and what became of it."""

from __future__ import annotations

import pytest

from descant import Trace, TraceError
from descant.trace.records import Asked, Candidate, Header, Look, Result, Row, Run, Said, Step

HEADER = Header("1", "Model", 50, 4, 5000)


def _look(*candidates):
    return Look(1.0, 1.0, tuple(Candidate(*one) for one in candidates))


def _beams():
    """Two beams: the second step drops one token, ends one and leaves the rest."""
    first = (Run((7,), (1,), 0, score=-0.4), Run((8,), (2,), 1, score=-1.1))
    second = (
        Run((9,), (3,), 0, score=-0.5),
        Run((5,), (4,), 1, score=-3.4),
        Run((2,), (5,), 0, score=-0.3, reason="eos"),
    )
    begun = _look((7, -0.5, -0.4), (8, -1.0, -1.1))
    going = _look((9, -0.1, -0.1), (2, -0.2, -0.2), (5, -3.0, -3.0))
    return [
        HEADER,
        Asked(0, 0, (1,), "beam search, 2 beams", beams=2),
        Step(0, 0.1, (Row(0, 0, 0, (begun,), (), first),)),
        Step(1, 0.1, (Row(0, 1, 0, (going,), (), second), Row(0, 2, 1))),
    ]


def test_every_token_is_a_node_with_what_is_known_of_it():
    tree = Trace(_beams()).tree
    assert [(node.parent, node.token, node.depth, node.born, node.left) for node in tree.of(0)] == [
        (None, None, 0, -1, None),
        (0, 7, 1, 0, None),
        (0, 8, 1, 0, 1),
        (1, 9, 2, 1, None),
        (1, 5, 2, 1, None),
        (1, 2, 2, 1, 1),
    ]
    figures = [(node.raw, node.processed, node.score) for node in tree.of(0)[1:3]]
    assert figures == [(-0.5, -0.4, -0.4), (-1.0, -1.1, -1.1)]
    assert [node.state for node in tree.of(0)] == ["alive", "alive", "dropped", "alive", "alive", "ended"]
    assert tree.nodes[1].children == [3, 4, 5]
    assert tree.nodes[3].look is not None
    assert [node.token for node in tree.path(5)] == [7, 2]


def test_what_was_returned_is_marked_best_first():
    records = [*_beams(), Result(0, (Said((7, 2), "eos", 5, -0.3), Said((7, 9), "length", 3, -0.5)))]
    tree = Trace(records).tree
    assert [node.state for node in tree.of(0)[1:]] == ["best", "dropped", "returned", "alive", "best"]
    assert (tree.nodes[5].rank, tree.nodes[3].rank, tree.nodes[4].rank) == (0, 1, None)


def test_tokens_taken_back_leave_and_others_come_in_their_place():
    records = [
        HEADER,
        Asked(0, 0, (1,), "greedy search"),
        Step(0, 0.1, (Row(0, 0, runs=(Run((7,), (1,)),)),)),
        Step(1, 0.1, (Row(0, 1, runs=(Run((8,), (2,)),)),)),
        Step(2, 0.1, (Row(0, 2, runs=(Run((), (), back=1),)),)),
        Step(3, 0.1, (Row(0, 1, runs=(Run((9,), (3,)),)),)),
    ]
    tree = Trace(records).tree
    assert [(node.number, node.parent, node.left) for node in tree.of(0)] == [
        (0, None, None), (1, 0, None), (2, 1, 2), (3, 1, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "reason", "guessed"),
    [((4, 5, 9), None, 2), ((4, 5), "eos", 2), ((9,), None, 0), ((4,), "length", 1)],
)
def test_guesses_that_stood_are_marked_the_last_one_too(tokens, reason, guessed):
    run = Run(tokens, tuple(range(1, len(tokens) + 1)), reason=reason)
    asked = Asked(0, 0, (1,), "greedy search", drafter="Lookup")
    tree = Trace([HEADER, asked, Step(0, 0.1, (Row(0, 0, drafts=(4, 5, 6), runs=(run,)),))]).tree
    assert [node.guessed for node in tree.of(0)[1:]] == [place < guessed for place in range(len(tokens))]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([Step(0, 0.1, (Row(3, 0),))], "request 3 run"),
        ([Asked(0, 0, (), ""), Step(0, 0.1, (Row(0, 9, runs=(Run((), ()),)),))], "node 9"),
        ([Asked(0, 0, (), ""), Step(0, 0.1, (Row(0, 0, runs=(Run((4,), ()),)),))], "a node for each token"),
        ([Asked(0, 0, (), ""), Step(0, 0.1, (Row(0, 0, runs=(Run((4,), (0,)),)),))], "each node once"),
        ([Asked(0, 0, (), ""), Step(0, 0.1, (Row(0, 0, runs=(Run((), (), back=2),)),))], "take back more"),
        ([Asked(0, 0, (), ""), Result(0, (Said((4,), "eos", 5),))], "node 5"),
        ([Asked(0, 0, (), ""), Result(0), Step(0, 0.1, (Row(0, 0),))], "request 0 run"),
    ],
)
def test_what_does_not_hang_together_is_an_error(records, says):
    with pytest.raises(TraceError, match=says):
        _ = Trace([HEADER, *records]).tree
