"""Where the constraints of transformers 4.52.4 are wrong by hand: each test shows theirs, then ours."""

from __future__ import annotations

import pytest

from descant.decoding import constraints
from descant.errors import InputError
from tests.unit.decoding.constraints.script import run


def theirs(reference, words, script, alone=False):
    return reference.ask("constraints", cases=[{"words": words, "script": script, "alone": alone}])[0]


def ours(words, script, alone=False):
    return run(constraints, words, script, alone)


def read(*tokens):
    return [["reset", list(tokens)], ["completed"]]


def test_a_phrase_begun_twice_is_missed(reference):
    """1 1 2 holds 1 2: the second 1 breaks the phrase off, and is not tried as its beginning."""
    assert theirs(reference, [[1, 2]], read(1, 1, 2)) == [None, False]
    assert ours([[1, 2]], read(1, 1, 2)) == [None, True]


def test_a_phrase_that_holds_its_own_beginning_is_missed(reference):
    given = [[1, 2, 1, 3]], read(1, 2, 1, 2, 1, 3)
    assert theirs(reference, *given) == [None, False]
    assert ours(*given) == [None, True]


def test_an_alternative_inside_another_is_missed(reference):
    given = [[[1, 2, 3, 4], [2, 3]]], read(1, 2, 3)
    assert theirs(reference, *given) == [None, False]
    assert ours(*given) == [None, True]


def test_the_token_that_breaks_a_phrase_begins_no_other(reference):
    given = [[1, 2], [3, 4]], [*read(1, 3, 4), ["get_bank"], ["advance"]]
    assert theirs(reference, *given) == [None, False, 0, [3, 1]]
    assert ours(*given) == [None, False, 2, [1]]


def test_phrases_that_overlap_are_not_both_met(reference):
    given = [[1, 2], [2, 3]], read(1, 2, 3)
    assert theirs(reference, *given) == [None, False]
    assert ours(*given) == [None, True]


def test_a_phrase_that_is_reset_has_its_first_token(reference):
    """And so one that breaks off: 1 9 2 meets 1 2."""
    given = [[1, 2]], [["reset"], ["remaining"], ["advance"]], True
    assert theirs(reference, *given) == [None, 1, 2]
    assert ours(*given) == [None, 2, 1]
    given = [[1, 2]], [["update", 1], ["update", 9], ["update", 2], ["completed"]], True
    assert theirs(reference, *given)[-1] is True
    assert ours(*given)[-1] is False


def test_copies_of_a_disjunction_share_what_they_read(reference):
    """The copy reads 2, and the original takes it for its own."""
    given = [[[1, 2, 3], [1, 4, 5]]], [["add", 1], ["copy"], ["add", 2], ["back"], ["get_bank"], ["advance"]]
    assert theirs(reference, *given)[-2:] == [2, [3]]
    assert ours(*given)[-2:] == [1, [2, 4]]


def test_a_copy_of_a_complete_list_is_not_complete(reference):
    given = [[1]], [["add", 1], ["completed"], ["copy"], ["completed"], ["get_bank"]]
    assert theirs(reference, *given)[1:] == [True, False, 1]
    assert ours(*given)[1:] == [True, True, 1]


def test_a_complete_list_stays_complete_when_reset(reference):
    given = [[1]], [["add", 1], ["reset", None], ["completed"], ["get_bank"]]
    assert theirs(reference, *given)[-2:] == [True, 0]
    assert ours(*given)[-2:] == [False, 0]


def test_tokens_are_proposed_twice(reference):
    given = [[1, 2], [1, 3]], [["advance"]]
    assert theirs(reference, *given) == [[1, 1]]
    assert ours(*given) == [[1]]


def test_an_alternative_may_be_empty(reference):
    """A disjunction of nothing proposes no token, and no token meets it."""
    assert theirs(reference, [[[]]], [["advance"], ["add", 1], ["completed"]])[::2] == [None, False]
    with pytest.raises(InputError, match="non-empty"):
        ours([[[]]], [])
