"""Where the constraints of transformers 4.52.4 are wrong by hand: theirs, then ours."""

from __future__ import annotations

import pytest

from descant.decoding import constraints
from descant.errors import InputError
from tests.unit.decoding.constraints.script import run


def read(*tokens):
    return [["reset", list(tokens)], ["completed"]]


# The words, the calls, whether on the first word alone, and the last answers of theirs and of ours.
CASES = {
    # 1 1 2 holds 1 2: the second 1 breaks the phrase off, and is not tried as its beginning.
    "a phrase begun twice is missed": ([[1, 2]], read(1, 1, 2), False, [False], [True]),
    "a phrase that holds its own beginning is missed": (
        [[1, 2, 1, 3]], read(1, 2, 1, 2, 1, 3), False, [False], [True],
    ),
    "an alternative inside another is missed": (
        [[[1, 2, 3, 4], [2, 3]]], read(1, 2, 3), False, [False], [True],
    ),
    "the token that breaks a phrase begins no other": (
        [[1, 2], [3, 4]], [*read(1, 3, 4), ["get_bank"], ["advance"]], False,
        [False, 0, [3, 1]], [False, 2, [1]],
    ),
    "phrases that overlap are not both met": ([[1, 2], [2, 3]], read(1, 2, 3), False, [False], [True]),
    "a phrase that is reset has its first token": (
        [[1, 2]], [["reset"], ["remaining"], ["advance"]], True, [1, 2], [2, 1],
    ),
    "and so one that breaks off: 1 9 2 meets 1 2": (
        [[1, 2]], [["update", 1], ["update", 9], ["update", 2], ["completed"]], True, [True], [False],
    ),
    # The copy reads 2, and the original takes it for its own.
    "copies of a disjunction share what they read": (
        [[[1, 2, 3], [1, 4, 5]]],
        [["add", 1], ["copy"], ["add", 2], ["back"], ["get_bank"], ["advance"]], False,
        [2, [3]], [1, [2, 4]],
    ),
    "a copy of a complete list is not complete": (
        [[1]], [["add", 1], ["completed"], ["copy"], ["completed"], ["get_bank"]], False,
        [True, False, 1], [True, True, 1],
    ),
    "a complete list stays complete when reset": (
        [[1]], [["add", 1], ["reset", None], ["completed"], ["get_bank"]], False, [True, 0], [False, 0],
    ),
    "tokens are proposed twice": ([[1, 2], [1, 3]], [["advance"]], False, [[1, 1]], [[1]]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_theirs_and_ours(reference, case):
    words, script, alone, theirs, mine = CASES[case]
    found = reference.ask("constraints", cases=[{"words": words, "script": script, "alone": alone}])[0]
    assert found[-len(theirs) :] == theirs
    assert run(constraints, words, script, alone)[-len(mine) :] == mine


def test_an_alternative_may_be_empty(reference):
    """A disjunction of nothing proposes no token, and no token meets it."""
    script = [["advance"], ["add", 1], ["completed"]]
    found = reference.ask("constraints", cases=[{"words": [[[]]], "script": script, "alone": False}])[0]
    assert found[::2] == [None, False]
    with pytest.raises(InputError, match="non-empty"):
        run(constraints, [[[]]], [])
