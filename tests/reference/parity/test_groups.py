"""Diverse beam search of a batch equals the reference's run of each row alone.

The pad token is kept out: a group that has ended goes on with it there, and later groups are penalised for
using it; see `test_method_bugs.py`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import TINY, five

NEW = 12
BEAMS = 6
GROUPS = (2, 3, 6)
PENALTIES = (0.5, 1.0, 2.5, 10.0)
EARLY = (False, True, "never")
LENGTH = (-1.0, 0.0, 1.0, 2.0)
SHOWN = [  # in CI
    (2, 0.5, False, 1.0),
    (3, 1.0, True, 0.0),
    (6, 2.5, "never", 2.0),
    (3, 10.0, False, 1.0),
]
EVERY = [
    *SHOWN,
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in product(GROUPS, PENALTIES, EARLY, LENGTH)
        if one not in SHOWN
    ),
]
# Prompt seeds with which the reference chooses by 4e-5 or more under what CI runs.
SEEDS = {
    "llama": (505, 503),
    "gpt2": (501, 502),
    "gpt-neox": (500, 502),
    "mistral": (502, 503),
    "qwen2": (501, 500),
    "gemma": (501, 502),
    "opt": (503, 505),
    "t5": (501, 502),
    "bart": (500, 501),
}
FEW = ("gpt2", "t5")
SOME = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in TINY if name not in FEW)]


def case(model, groups, penalty, early=False, length=1.0, **more):
    pad = 0 if model.name == "gpt2" else model.pad  # gpt2's own is its end token
    return {
        "num_beams": BEAMS,
        "num_beam_groups": groups,
        "diversity_penalty": penalty,
        "early_stopping": early,
        "length_penalty": length,
        "max_new_tokens": NEW,
        "pad_token_id": pad,
        "suppress_tokens": [pad],
        **more,
    }


@pytest.mark.parametrize(("groups", "penalty", "early", "length"), EVERY)
@pytest.mark.parametrize("name", TINY)
def test_ragged_rows(name, groups, penalty, early, length, tiny, reference):
    """The best sequence, its score, and the scores of every beam at every step until its group ends."""
    model = tiny(name)
    call = Call(model, case(model, groups, penalty, early, length))
    compare.by_row(reference, call, five(model, SEEDS[name][0]))


@pytest.mark.parametrize(("groups", "early"), [(2, False), (3, True), (6, "never")])
@pytest.mark.parametrize("name", SOME)
def test_every_sequence(name, groups, early, tiny, reference):
    """As many sequences as beams: the best of all groups together, as the reference sorts them."""
    model = tiny(name)
    arguments = case(model, groups, 1.0, early, num_return_sequences=BEAMS)
    compare.by_row(reference, Call(model, arguments), five(model, SEEDS[name][1]))


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 8},
    "several end tokens": {"eos_token_id": [2, 7, 30, 31, 32, 33]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "four beams": {"num_beams": 4},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SOME)
def test_option(name, option, tiny, reference):
    model = tiny(name)
    arguments = case(model, 2, 1.0, num_return_sequences=2, **OPTIONS[option])

    def has_first_end(ours, theirs):
        """The reference writes the first end token at the end of a sequence, whichever has ended it."""
        ends = OPTIONS[option].get("eos_token_id", ())
        replaced = [[*row[:-1], ends[0]] if row[-1] in ends[1:] else row for row in ours.tokens]
        return ours.tokens != theirs.tokens == replaced

    compare.by_row(reference, Call(model, arguments), five(model, SEEDS[name][1]), has_first_end)
