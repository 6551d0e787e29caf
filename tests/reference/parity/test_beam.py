"""Beam search of a batch equals the reference's run of each row alone."""

from __future__ import annotations

from itertools import combinations, product

import pytest

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import (
    ENCODER_DECODER,
    NAMES,
    STORIES,
    TINY,
    level,
    ragged,
    seeds,
    subject,
)

NEW = 14
BEAMS = (2, 4, 8)
EARLY = (False, True, "never")
PENALTY = (-1.0, 0.0, 1.0, 2.0)
EVERY = list(product(BEAMS, EARLY, PENALTY))


def case(beams, early, penalty):
    return {"num_beams": beams, "early_stopping": early, "length_penalty": penalty, "max_new_tokens": NEW}


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(("beams", "early", "penalty"), EVERY)
@pytest.mark.parametrize("name", TINY)
def test_every_setting(name, beams, early, penalty, seed, tiny, reference):
    model = tiny(name)
    compare.by_row(reference, Call(model, case(beams, early, penalty)), ragged(model, seed))


@pytest.mark.parametrize(("beams", "early", "penalty"), EVERY)
def test_every_setting_on_stories(beams, early, penalty, tiny, reference):
    model = subject(STORIES, tiny)
    arguments = {**case(beams, early, penalty), "max_new_tokens": 10}
    compare.by_row(reference, Call(model, arguments, full=False), ragged(model))


@pytest.mark.slow
def test_the_settings_matter(tiny):
    """Precondition of the test above: every value of a setting changes some tokens."""
    seen = {}
    for name in TINY:
        model = tiny(name)
        for setting in EVERY:
            found = descant.generate(model.model, **ragged(model).inputs, **case(*setting))
            seen[name, *setting] = found.tolist()
    for values, place in ((BEAMS, 1), (EARLY, 2), (PENALTY, 3)):
        for one, other in combinations(values, 2):
            keys = [key for key in seen if key[place] == one]
            others = [(*key[:place], other, *key[place + 1 :]) for key in keys]
            changed = {k[0] for k, o in zip(keys, others, strict=True) if seen[k] != seen[o]}
            assert len(changed) >= 4, f"{one} and {other} differ on {sorted(changed)} only"


@pytest.mark.parametrize("name", NAMES)
def test_level_rows(name, tiny, reference):
    model = subject(name, tiny)
    compare.by_row(reference, Call(model, case(4, False, 1.0)), level(model))


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("name", NAMES)
def test_several_sequences(name, early, tiny, reference):
    model = subject(name, tiny)
    arguments = {**case(4, early, 1.0), "num_return_sequences": 3}
    for answer in compare.by_row(reference, Call(model, arguments), ragged(model)):
        assert len({tuple(t) for t in answer.tokens}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_default_length(name, tiny, reference):
    model = subject(name, tiny)
    compare.by_row(reference, Call(model, {"num_beams": 3}), ragged(model))


OPTIONS = {
    "max_length": {},  # filled in below: the longest prompt and a little more
    "min_length": {"min_length": 13, "max_new_tokens": NEW},
    "min_new_tokens": {"min_new_tokens": 8, "max_new_tokens": NEW},
    "several end tokens": {"eos_token_id": [2, 7, 30, 31, 32, 33], "max_new_tokens": NEW},
    "forced_eos": {"forced_eos_token_id": 5, "max_new_tokens": 6},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60)), "max_new_tokens": NEW},
    "repetition_penalty": {"repetition_penalty": 1.3, "max_new_tokens": NEW},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.3, "max_new_tokens": NEW},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_option(name, option, tiny, reference):
    model = subject(name, tiny)
    prompts = ragged(model)
    arguments = {"num_beams": 3, "num_return_sequences": 2, **OPTIONS[option]}
    if option == "max_length":
        arguments["max_length"] = max(map(len, prompts.rows)) + 3
    compare.by_row(reference, Call(model, arguments, full=name != STORIES), prompts)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_forced_bos(name, tiny, reference):
    model = tiny(name)
    # Only one beam remains after the forced token.
    arguments = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": NEW, "forced_bos_token_id": 33}
    call = Call(model, arguments)
    for answer in compare.by_row(reference, call, ragged(model)):
        assert answer.tokens[0][0] == 33
