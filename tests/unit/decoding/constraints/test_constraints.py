"""Single constraints: what they read, refuse and copy."""

from __future__ import annotations

import random

import pytest
import torch

from descant.decoding.constraints import (
    Constraint,
    DisjunctiveConstraint,
    PhrasalConstraint,
    parse_force_words,
)
from descant.errors import InputError
from tests.unit.decoding.constraints.cases import overlapping
from tests.unit.decoding.constraints.own import Often
from tests.unit.decoding.constraints.reference import look_through


@pytest.mark.parametrize("seed", range(2))
def test_a_text_is_searched_exactly(seed):
    """Progress, end and proposals after every token, against a search of the whole text."""
    draw = random.Random(seed)
    met = 0
    for _ in range(400):
        made, choices, text = overlapping(draw)
        one, phrases = made[0], choices[:1]
        for end in range(1, len(text) + 1):
            before, willing = one.remaining(), one.does_advance(text[end - 1])
            stepped, completed, reset = one.update(text[end - 1])
            found = look_through(phrases, text[:end])
            part = found.begun.get(0, [])
            assert completed == one.completed == bool(found.met)
            assert one.remaining() == (0 if completed else one.seqlen - len(part))
            assert reset == (not part and not completed)
            if completed:
                assert one.advance() is None
                assert not one.does_advance(text[end - 1])
                met += 1
                break
            given = one.advance()
            listed = given if isinstance(given, list) else [given]
            assert len(set(listed)) == len(listed)
            found.begun.setdefault(0, [])
            assert set(listed) == found.next_tokens(phrases)
            assert stepped == willing == (one.remaining() < before)
    assert 200 < met < 400


@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_tokens_are_counted_exactly(seed):
    """No shorter text meets it, and one as long does, by search over all texts."""
    draw = random.Random(seed)
    for _ in range(60):
        made, _, text = overlapping(draw)
        one = made[0]
        for token in text[:5]:
            one.update(token)
        reached = [one]
        for _ in range(one.min_tokens_left):
            assert not any(state.completed for state in reached)
            reached = [_after(state, token) for state in reached for token in range(4)]
        assert any(state.completed for state in reached)


def _after(one, token):
    new = one.copy(stateful=True)
    new.update(token)
    return new


def test_copies_are_apart_and_share_their_tables():
    for one in (PhrasalConstraint([1, 2]), DisjunctiveConstraint([[1, 2], [3]])):
        one.update(1)
        same, new = one.copy(stateful=True), one.copy()
        assert (same.remaining(), new.remaining()) == (1, 2)
        assert same._automaton is one._automaton is new._automaton
        same.update(2)
        assert (same.completed, one.completed, new.completed) == (True, False, False)


def test_a_copy_keeps_the_class_of_a_user():
    class Named(PhrasalConstraint):
        def __init__(self, name, token_ids):
            super().__init__(token_ids)
            self.name = name

    copy = Named("x", [1, 2]).copy()
    assert type(copy) is Named
    assert (copy.name, copy.token_ids) == ("x", [1, 2])


def test_what_is_given_is_not_shared():
    given = [1, 2]
    one = PhrasalConstraint(given)
    given.append(3)
    assert one.token_ids == [1, 2]


def test_tokens_of_other_kinds_of_integer_are_read():
    one = PhrasalConstraint([torch.tensor(1), 2])
    assert one.token_ids == [1, 2]
    assert one.update(torch.tensor(1)) == (True, False, False)


@pytest.mark.parametrize("token", [1.0, "1", None, True, [1], torch.tensor(1.0)], ids=str)
def test_tokens_that_are_none_are_refused(token):
    for one in (PhrasalConstraint([1]), DisjunctiveConstraint([[1]])):
        for ask in (one.update, one.does_advance):
            with pytest.raises(InputError, match="`token_id` must be an int"):
                ask(token)
        assert not one.completed


NESTED = "`nested_token_ids` must"


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        *(
            (make, value, message)
            for value in (None, 5, [], "12", [1, -1], [1, True], [1, None], [[1]], {1: 2})
            for make, message in (
                (PhrasalConstraint, "`token_ids` must be a non-empty list of token ids"),
                (lambda value: DisjunctiveConstraint([[1], value]), f"{NESTED} be a non-empty list"),
            )
        ),
        *((DisjunctiveConstraint, value, NESTED) for value in (None, [], [1, 2], "12")),
        *(
            (DisjunctiveConstraint, value, "no phrase that is a prefix of another")
            for value in ([[1, 2], [3], [1, 2, 3]], [[1, 2, 3], [1]], [[1], [1]])
        ),
        *(
            (parse_force_words, value, "`force_words_ids` must be a non-empty list of words")
            for value in (None, [], [1, 2], [[]], [[[]]], [[1, [2]]], [[[1], [1]]], "ab")
        ),
    ],
)
def test_phrases_and_words_that_are_none_are_refused(make, given, message):
    with pytest.raises(InputError, match=message):
        make(given)


def test_ends_and_middles_of_other_alternatives_are_no_matter():
    assert DisjunctiveConstraint([[1, 2], [2], [3, 1, 2]]).seqlen == 3


def test_words_become_constraints():
    made = parse_force_words(([1, 2], [[3], (4, 5)], (6,)))
    assert [type(one) for one in made] == [PhrasalConstraint, DisjunctiveConstraint, PhrasalConstraint]
    assert [one.token_ids for one in made] == [[1, 2], [[3], [4, 5]], [6]]
    assert repr(made) == (
        "[PhrasalConstraint([1, 2]), DisjunctiveConstraint([[3], [4, 5]]), PhrasalConstraint([6])]"
    )


def test_a_users_constraint_is_tested_and_left_unread():
    one = Often(3, 2)
    assert (one.remaining(), one.min_tokens_left) == (2, 2)


def broken(**methods):
    return type("Broken", (Often,), methods)


FAULTS = {
    r"does_advance\(\) must be true of every token": {"does_advance": lambda self, token_id: False},
    r"must complete it": {
        "update": lambda self, token_id: (True, False, False),
        "remaining": lambda self: 2,
    },
    r"advance\(\) must give a token": {"advance": lambda self: None},
    r"must be 0 once it is complete": {"remaining": lambda self: 2},
    r"must be 2 again after reset\(\)": {"reset": lambda self: None},
    r"must be >= 1 before any token": {"remaining": lambda self: 0},
    r"must return \(stepped, completed, reset\)": {"update": lambda self, token_id: (True, True)},
    r"must step where does_advance\(\) is true": {"update": lambda self, token_id: (False, True, False)},
}


@pytest.mark.parametrize("message", FAULTS)
def test_an_unsound_constraint_is_refused(message):
    with pytest.raises(InputError, match=f"in Broken .*({message})"):
        broken(**FAULTS[message])(3, 2)


def test_a_constraint_lacking_a_method_cannot_be_made():
    class Half(Constraint):
        def advance(self):
            return 1

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_every_token_of_a_list_must_advance():
    with pytest.raises(InputError, match=r"every token of advance\(\), got \[9\]"):
        broken(advance=lambda self: [3, 9])(3, 2)
    assert broken(advance=lambda self: [3])(3, 2).remaining() == 2


def test_a_reset_must_work_half_way():
    def reset(self):
        self.count %= self.times

    with pytest.raises(InputError, match=r"must be 2 again after reset\(\), got 1"):
        broken(reset=reset)(3, 2)
