"""The state of a list: banks, proposals and ends against a search of the whole text; order, gaps, copies."""

from __future__ import annotations

import random

import pytest

from descant.decoding.constraints import (
    ConstraintListState,
    PhrasalConstraint,
    parse_force_words,
)
from descant.errors import InputError
from tests.unit.decoding.constraints.cases import overlapping
from tests.unit.decoding.constraints.own import Often, Words
from tests.unit.decoding.constraints.reference import look_through

WAYS = [(False, 0), (True, 0), (False, 1), (False, 3), (True, 2)]


def check(state, choices, text, ordered=False, gap=0):
    """A state after a text is what a search of the text says."""
    found = look_through(choices, text, ordered, gap)
    sizes = [max(map(len, phrases)) for phrases in choices]
    places = range(len(choices))
    assert state.unmet_indices == tuple(place for place in places if place not in found.met)
    assert state.completed == (len(found.met) == len(choices))
    assert _places(state, state.complete_constraints) == found.met
    pending = [place for place in state.unmet_indices if place not in found.begun]
    assert sorted(_places(state, state.pending_constraints)) == pending
    left = {place: sizes[place] - len(part) for place, part in found.begun.items()}
    bank = len(found.met) * max(sizes)
    if left:
        nearest = min(left, key=lambda place: (left[place], place))
        assert _places(state, [state.inprogress_constraint]) == [nearest]
        assert state.inprogress_constraint.remaining() == left[nearest]
        bank += max(sizes) - left[nearest]
    else:
        assert state.inprogress_constraint is None
    assert state.get_bank() == bank
    if not found.begun and found.start <= len(text):
        found.begun = {place: [] for place in (state.unmet_indices[:1] if ordered else state.unmet_indices)}
    tokens = state.advance()
    assert tokens is None or len(set(tokens)) == len(tokens)
    assert set(tokens or ()) == found.next_tokens(choices)
    assert (tokens is None) == (state.completed or found.start > len(text))


def _places(state, some):
    """Where constraints stand in the list, by the object that is in use there."""
    return [next(at for at, own in enumerate(state._current) if own is one) for one in some]


@pytest.mark.parametrize(("ordered", "gap"), WAYS)
def test_texts_are_searched_exactly(ordered, gap):
    """After every token of 150 texts, in each of the ways."""
    draw = random.Random(f"{ordered} {gap}")
    ended = 0
    for _ in range(150):
        made, choices, text = overlapping(draw)
        state = ConstraintListState(made, ordered, gap)
        check(state, choices, [], ordered, gap)
        for end in range(1, len(text) + 1):
            before, unmet = state.get_bank(), state.unmet_indices
            complete, stepped = state.add(text[end - 1])
            check(state, choices, text[:end], ordered, gap)
            assert complete == (state.unmet_indices != unmet or not unmet)
            assert stepped or state.get_bank() <= before
        ended += state.completed
        assert all(one.remaining() == one.seqlen for one in made)  # what was given is not changed
    assert 0.15 * 150 < ended < 0.975 * 150


@pytest.mark.parametrize(("ordered", "gap"), WAYS)
def test_the_least_is_no_more_than_it_takes(ordered, gap):
    """No text of fewer tokens meets the rest, by search; in order, or alone, one as long does."""
    draw = random.Random(f"{ordered} {gap} least")
    tried = exact = 0
    while tried < 60:
        made, _, text = overlapping(draw)
        state = ConstraintListState(made, ordered, gap)
        state.reset(text[: draw.randrange(8)])
        if state.min_tokens_left > 6:
            continue
        tried += 1
        assert (state.min_tokens_left == 0) == state.completed
        reached = [state]
        for _ in range(state.min_tokens_left):
            assert not any(one.completed for one in reached)
            reached = list(_distinct(_after(one, token) for one in reached for token in range(4)))
        if ordered or len(state.unmet_indices) <= 1:
            assert any(one.completed for one in reached)
            exact += state.min_tokens_left > 1
    assert exact > 10


def _after(state, token):
    new = state.copy()
    new.add(token)
    return new


def _distinct(states):
    return {
        (one.unmet_indices, one._gap_left, *(part._node for part in one._current)): one for one in states
    }.values()


def test_the_least_of_a_list():
    words = parse_force_words([[1, 2, 3], [[4, 5], [6, 7, 8, 9]], [1, 2]])
    assert ConstraintListState(words).min_tokens_left == 3
    assert ConstraintListState(words, ordered=True).min_tokens_left == 7
    state = ConstraintListState(words, gap=5)
    assert state.min_tokens_left == 17
    state.reset([1, 2])  # meets the last, and drops what the first has
    assert (state.unmet_indices, state.min_tokens_left) == ((0, 1), 15)
    state.add(1)
    assert state.min_tokens_left == 14
    mixed = ConstraintListState([Often(3, 4), PhrasalConstraint([1, 2])])
    mixed.add(3)
    assert mixed.min_tokens_left == 3
    assert ConstraintListState([Often(3, 4), PhrasalConstraint([1, 2])], gap=1).min_tokens_left == 7


@pytest.mark.parametrize(("ordered", "gap"), WAYS)
def test_copies_go_their_own_ways(ordered, gap):
    """A tree of copies, each fed at random times, and each at last what its own text says."""
    draw = random.Random(f"{ordered} {gap} copies")
    for _ in range(60):
        made, choices, text = overlapping(draw)
        tree = [(ConstraintListState(made, ordered, gap), [])]
        for _ in range(40):
            state, read = draw.choice(tree)
            if draw.random() < 0.25:
                tree.append((state.copy(), list(read)))
            else:
                read.append(draw.choice(text))
                state.add(read[-1])
        for state, read in tree:
            check(state, choices, read, ordered, gap)
            check(state.copy(stateful=False), choices, [], ordered, gap)
            state.reset(None)
            check(state, choices, [], ordered, gap)
        assert len(tree) > 2


def test_lists_that_are_none_are_refused():
    for given in ([], None, [[1, 2]], PhrasalConstraint([1])):
        with pytest.raises(InputError, match="`constraints` must be a non-empty list of Constraint objects"):
            ConstraintListState(given)
    for gap in (-1, 1.5, None, True):
        with pytest.raises(InputError, match="`constraint_gap` must be an int >= 0"):
            ConstraintListState([PhrasalConstraint([1])], gap=gap)
    state = ConstraintListState((PhrasalConstraint([1]),))
    for token in ("1", 1.0, None):
        with pytest.raises(InputError, match="`token_id` must be an int"):
            state.add(token)


@pytest.mark.parametrize("gap", [0, 2])
def test_a_users_constraint_is_read_as_our_own(gap):
    """`Words` resets at a break, so that phrases with a single start are found as by ours."""
    draw = random.Random(gap)
    for _ in range(300):
        phrases = []
        while len(phrases) < 2:
            phrase = [draw.randrange(3) for _ in range(draw.randint(1, 4))]
            if phrase[0] not in phrase[1:]:
                phrases.append(phrase)
        theirs = ConstraintListState([Words(phrase) for phrase in phrases], gap=gap)
        ours = ConstraintListState(parse_force_words(phrases), gap=gap)
        for _ in range(12):
            token = draw.randrange(3)
            assert theirs.add(token) == ours.add(token)
            assert theirs.get_bank() == ours.get_bank()
            assert (theirs.advance(), theirs.unmet_indices, theirs.min_tokens_left) == (
                ours.advance(),
                ours.unmet_indices,
                ours.min_tokens_left,
            )
            theirs = theirs.copy() if draw.random() < 0.3 else theirs


def test_a_users_constraint_reads_all_once_begun_and_else_what_advances_it():
    log = []
    state = ConstraintListState([Words([1, 2, 3], log)])
    log.clear()
    state.reset([9, 2, 1, 2, 9, 9, 1, 1, 2, 3, 5])
    #            -  -  1  2  9  -  1  1 (and again as a beginning)  2  3  -
    assert log == [1, 2, 9, 1, 1, 1, 2, 3]
    assert state.completed


def test_a_users_state_is_copied():
    state = ConstraintListState([Often(3, 3), PhrasalConstraint([1, 2])])
    state.reset([3, 9, 1])
    assert (state.get_bank(), state.advance()) == (3 - 1, [3, 2])
    copy = state.copy()
    copy.reset([3, 9, 3, 3])
    state.add(3)
    assert (state.get_bank(), copy.unmet_indices, state.unmet_indices) == (2, (1,), (0, 1))
    assert state.inprogress_constraint.count == 2
    assert state.max_seqlen == 3


def test_an_unsound_constraint_is_found_out():
    class Liar(Often):
        def test(self):
            pass

        def update(self, token_id):
            return False, False, False

    with pytest.raises(InputError, match=r"in Liar update\(\) must step where does_advance\(\) is true"):
        ConstraintListState([Liar(3, 2)]).add(3)

    class Done(Often):
        def test(self):
            self.count = self.times

    with pytest.raises(InputError, match=r"remaining\(\) of a new copy must be >= 1"):
        ConstraintListState([Done(3, 2)])


def test_what_the_given_have_read_is_no_matter():
    one = PhrasalConstraint([1, 2])
    one.update(1)
    state = ConstraintListState([one])
    one.update(2)
    assert (state.get_bank(), state.advance(), state.constraints) == (0, [1], [one])
