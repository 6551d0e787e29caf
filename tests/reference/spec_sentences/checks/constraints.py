"""Constraints: their classes, their state, and generate with them."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import refused
from tests.reference.spec_sentences.sentence import CONFIG, CONSTRAINTS, UTILITIES, page

says, field, api = page(UTILITIES), page(CONFIG), page(CONSTRAINTS)


def contains(row, words):
    """Whether a row has the words in a run."""
    return any(row[at : at + len(words)] == words for at in range(len(row)))


@says("con_halts", 1736, "Advancing a constraint step by step always completes it.")
def _(lib):
    found = []
    for made in (lib.PhrasalConstraint([3, 4, 5]), lib.DisjunctiveConstraint([[3, 4], [5, 6, 7]])):
        completed, steps = False, 0
        while not completed:
            token = made.advance()
            token = token if isinstance(token, int) else token[0]
            _, completed, _ = made.update(token)
            steps += 1
            assert steps < 9
        found.append(steps)
    return found


@says(
    "con_two",
    1733,
    "`update` returns two values in the documented loop.",
    ours="It returns three, as 4.52.4 does: stepped, completed, reset.",
    theirs="It returns three: stepped, completed, reset.",
)
def _(lib):
    made = lib.PhrasalConstraint([3, 4])
    _, completed = made.update(made.advance())
    assert completed is False


@says("con_phrasal", 1740, "PhrasalConstraint is an ordered sequence of tokens.")
def _(lib):
    made = lib.PhrasalConstraint([3, 4, 5])
    assert made.does_advance(3)
    assert not made.does_advance(4)
    return [
        made.advance(),
        made.remaining(),
        list(made.update(3)),
        list(made.update(4)),
        list(made.update(9)),
    ]


@api("con_reset", 98, "`reset` begins a constraint anew.", theirs="It counts the first token as done.")
def _(lib):
    made = lib.PhrasalConstraint([3, 4])
    made.update(3)
    made.reset()
    assert made.remaining() == 2


@api("con_copy", 117, "`copy` is a new constraint, with the state where it is asked for.")
def _(lib):
    made = lib.PhrasalConstraint([3, 4])
    made.update(3)
    return made.copy().remaining(), made.copy(stateful=True).remaining()


@says("con_disj", 1748, "DisjunctiveConstraint is fulfilled by one of its words.")
def _(lib):
    made = lib.DisjunctiveConstraint([[3, 4], [5, 6]])
    assert sorted(made.advance()) == [3, 5]
    made.update(5)
    _, completed, _ = made.update(6)
    return completed, made.remaining()


for _name, _bad in (("empty", []), ("nested_empty", [[]]), ("negative", [[-1]])):

    @api(
        f"con_disj_{_name}",
        274,
        f"DisjunctiveConstraint refuses {_bad}.",
        theirs="It accepts an empty word." if _name == "nested_empty" else "",
    )
    def _(lib, bad=_bad):
        with refused(ValueError):
            lib.DisjunctiveConstraint(bad)


@api("con_disj_prefix", 256, "A word of a disjunction must not be the beginning of another.")
def _(lib):
    with refused(ValueError):
        lib.DisjunctiveConstraint([[1, 2], [1, 2, 3]])


for _name, _bad in (("empty", []), ("words", ["a"]), ("negative", [-1])):

    @api(f"con_phrasal_{_name}", 141, f"PhrasalConstraint refuses {_bad}.")
    def _(lib, bad=_bad):
        with refused(ValueError):
            lib.PhrasalConstraint(bad)


@api("con_type", 64, "`does_advance` and `update` refuse what is no token.")
def _(lib):
    for made in (lib.PhrasalConstraint([3, 4]), lib.DisjunctiveConstraint([[3, 4], [5, 6]])):
        with refused(TypeError, ValueError):
            made.does_advance("a")
        with refused(TypeError, ValueError):
            made.update("a")


@api("con_abstract", 5, "Constraint is abstract.")
def _(lib):
    with refused(TypeError, NotImplementedError):
        lib.Constraint()


@api("con_state", 354, "ConstraintListState tracks several constraints.")
def _(lib):
    state = lib.ConstraintListState([lib.PhrasalConstraint([3, 4]), lib.PhrasalConstraint([7])])
    first = sorted(state.advance())
    bank = [state.get_bank()]
    for token in (3, 4, 7):
        state.add(token)
        bank.append(state.get_bank())
    assert state.completed
    return first, bank


@api("con_state_reset", 421, "A state is set anew from the tokens so far.")
def _(lib):
    state = lib.ConstraintListState([lib.PhrasalConstraint([3, 4]), lib.PhrasalConstraint([7])])
    state.reset([3, 4])
    return state.get_bank(), sorted(state.advance()), state.completed


@api("con_state_copy", 512, "A state is copied with its progress.")
def _(lib):
    state = lib.ConstraintListState([lib.PhrasalConstraint([3, 4]), lib.PhrasalConstraint([7])])
    state.add(7)
    return state.copy().get_bank()


@says("con_gen", 1723, "Constraints force tokens into the output.")
def _(lib):
    found = lib.model().generate(
        lib.ids(), constraints=[lib.PhrasalConstraint([11, 12])], num_beams=4, max_new_tokens=8
    )
    assert contains(found[0, 6:].tolist(), [11, 12])


@field("con_force", 251, "`force_words_ids` forces words into the output.")
def _(lib):
    found = lib.model().generate(lib.ids(), force_words_ids=[[11], [21]], num_beams=5, max_new_tokens=9)
    assert contains(found[0, 6:].tolist(), [11])
    assert contains(found[0, 6:].tolist(), [21])


@field("con_force_any", 252, "A list of lists of words is a choice of one of them.")
def _(lib):
    found = lib.model().generate(lib.ids(), force_words_ids=[[[11], [21]]], num_beams=5, max_new_tokens=9)
    row = found[0, 6:].tolist()
    assert contains(row, [11]) or contains(row, [21])


@field("bart_force", 251, "`force_words_ids` works on an encoder-decoder model.")
def _(lib):
    found = lib.model("bart").generate(lib.ids("bart"), force_words_ids=[[11]], num_beams=4, max_new_tokens=8)
    assert contains(found[0].tolist(), [11])


@field("con_nobeams", 260, "Constraints without beams are an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), force_words_ids=[[11]], num_beams=1, max_new_tokens=4)


@field("con_sample", 260, "Constraints with sampling are an error.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), force_words_ids=[[11]], num_beams=3, do_sample=True, max_new_tokens=4)


@field(
    "con_groups",
    260,
    "Constraints with groups of beams are an error.",
    ours="Groups of beams take constraints; one that is not met is an error.",
)
def _(lib):
    with refused(ValueError):
        lib.model().generate(
            lib.ids(),
            force_words_ids=[[11]],
            num_beams=4,
            num_beam_groups=2,
            diversity_penalty=1.0,
            max_new_tokens=4,
        )


@says(
    "con_own",
    1725,
    "A class of one's own that defines how it is satisfied is a constraint.",
)
def _(lib):
    class One(lib.Constraint):
        seqlen = 1

        def __init__(self):
            self.done = False
            super().__init__()

        def advance(self):
            return 11

        def does_advance(self, token_id):
            return token_id == 11

        def update(self, token_id):
            self.done = self.completed = self.does_advance(token_id)
            return self.done, self.done, not self.done

        def reset(self):
            self.done = self.completed = False

        def remaining(self):
            return 0 if self.done else 1

        def copy(self, stateful=False):
            other = One()
            other.done = other.completed = stateful and self.done
            return other

    found = lib.model().generate(lib.ids(), constraints=[One()], num_beams=3, max_new_tokens=6)
    assert 11 in found[0, 6:].tolist()


@api("con_test", 24, "`test` finds a constraint that never completes.")
def _(lib):
    class Endless(lib.Constraint):
        seqlen = 1
        advance = lambda self: 5  # noqa: E731
        does_advance = lambda self, token_id: True  # noqa: E731
        update = lambda self, token_id: (True, False, False)  # noqa: E731
        reset = lambda self: None  # noqa: E731
        remaining = lambda self: 1  # noqa: E731
        copy = lambda self, stateful=False: self  # noqa: E731

    with refused(Exception):
        Endless().test()


@says("con_tensor_tokens", 1742, "A phrase is generated in its order.")
def _(lib):
    found = lib.model().generate(
        lib.ids(), constraints=[lib.PhrasalConstraint([31, 32, 33])], num_beams=6, max_new_tokens=10
    )
    assert contains(found[0, 6:].tolist(), [31, 32, 33])
    assert isinstance(found, torch.Tensor)
