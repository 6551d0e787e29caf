"""Constraints against transformers 4.52.4, where it is right."""

from __future__ import annotations

import random

import pytest

from descant.decoding import constraints
from descant.errors import InputError
from tests.reference.process.client import ReferenceFailure
from tests.unit.decoding.constraints.cases import NOISE, apart
from tests.unit.decoding.constraints.script import run

ASKED = [["get_bank"], ["advance"], ["completed"]]


def both(reference, cases):
    return reference.ask("constraints", cases=cases), [run(constraints, **case) for case in cases]


def plain(value):
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def test_lists_read_texts_without_overlaps_alike(reference):
    """What `add` returns, the bank, the tokens proposed in their order, and the end, after every token."""
    draw = random.Random(1)
    cases = []
    for _ in range(500):
        words, text = apart(draw)
        cases.append({"words": words, "script": ASKED + [do for t in text for do in (["add", t], *ASKED)]})
    theirs, ours = both(reference, cases)
    assert plain(ours) == plain(theirs)
    ended = sum(one[-1] for one in ours)
    assert 100 < ended < 400  # the cases are no trivial ones
    assert sum(len(one) for one in ours) > 20_000


def test_lists_begin_anew_alike(reference):
    draw = random.Random(2)
    cases = []
    for _ in range(200):
        words, text = apart(draw)
        early = text[: draw.randrange(len(text))]
        cases.append({"words": words, "script": [*(["add", t] for t in early), ["completed"]]})
        # A state that was complete stays so there, whatever it is reset to: see test_known_bugs.
        if not run(constraints, **cases[-1])[-1]:
            cases[-1]["script"] += [["reset", None], *ASKED, ["reset", text], *ASKED]
    theirs, ours = both(reference, cases)
    assert plain(ours) == plain(theirs)
    assert sum(len(case["script"]) > 8 for case in cases) > 100


def test_single_constraints_read_alike(reference):
    """Up to the first break of a phrase, where 4.52.4 goes wrong, and to the end of a disjunction."""
    draw = random.Random(3)
    cases = []
    for _ in range(400):
        words, text = apart(draw)
        kind = isinstance(words[0][0], list)
        whole = draw.choice(words[0]) if kind else words[0]
        text = [*text, NOISE, *whole] if kind else whole[: draw.randint(1, len(whole))]
        script = [["seqlen"], ["remaining"], ["advance"]]
        found = constraints.parse_force_words(words)[0]
        for token in text:
            script += [["does_advance", token], ["update", token], ["completed"], ["remaining"], ["advance"]]
            if found.update(token)[1]:
                break
        cases.append({"words": words[:1], "script": script, "alone": True})
    theirs, ours = both(reference, cases)
    assert plain(ours) == plain(theirs)


REFUSED = [
    [[]],
    [[-1]],
    [[1, "a"]],
    [[1.5]],
    [[[1, 2], [1, 2, 3]]],
    [[[1, 2, 3], [1, 2]]],
    [[[4], [1, 2], [1, 2]]],
    [[[1], [-2]]],
    [[[1], 2]],
]


@pytest.mark.parametrize("words", REFUSED, ids=str)
def test_what_is_refused_there_is_refused_here(reference, words):
    with pytest.raises(ReferenceFailure):
        reference.ask("constraints", cases=[{"words": words, "script": []}])
    with pytest.raises(InputError):
        constraints.parse_force_words(words)
