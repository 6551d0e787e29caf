"""Sampling draws the same tokens as the reference under the same torch seed."""

from __future__ import annotations

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import NAMES, TINY, level, ragged, seeds, subject

NEW = 16
SETTINGS = {
    "defaults": {},
    "top_k": {"top_k": 5},
    "temperature and top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "no filter": {"top_k": 0},
    "hot": {"temperature": 1.8, "top_k": 0, "top_p": 0.95, "min_p": 0.01},
}


@pytest.mark.parametrize("seed", seeds(1, 10))
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows(name, setting, seed, tiny, reference):
    model = subject(name, tiny)
    call = Call(model, {"do_sample": True, "max_new_tokens": NEW, **SETTINGS[setting]}, seed=seed)
    compare.batched(reference, call, ragged(model, seed))


@pytest.mark.parametrize("name", NAMES)
def test_level_rows(name, tiny, reference):
    model = subject(name, tiny)
    compare.batched(reference, Call(model, {"do_sample": True, "max_new_tokens": NEW}, seed=3), level(model))


@pytest.mark.parametrize("name", NAMES)
def test_several_sequences(name, tiny, reference):
    model = subject(name, tiny)
    arguments = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 3}
    answers = compare.batched(reference, Call(model, arguments, seed=5), ragged(model))
    assert any(len({tuple(t) for t in a.tokens}) == 3 for a in answers)


@pytest.mark.parametrize("name", TINY)
def test_rows_that_end_early_leave_the_noise_of_the_others_alone(name, tiny, reference):
    model = tiny(name)
    seen = set()
    for seed in range(4):
        call = Call(model, {"do_sample": True, "max_new_tokens": NEW, "temperature": 1.5}, seed=seed)
        seen |= {len(a.tokens[0]) for a in compare.batched(reference, call, ragged(model))}
    assert len(seen) >= 3, f"rows end at {seen}: too uniform to show it"


OPTIONS = {
    "min_new_tokens": {"min_new_tokens": 9, "max_new_tokens": NEW},
    "several end tokens": {"eos_token_id": [2, 7, 30, 31, 32, 33], "max_new_tokens": NEW},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60)), "max_new_tokens": NEW},
    "renormalize_logits": {"renormalize_logits": True, "top_k": 5, "max_new_tokens": NEW},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_option(name, option, tiny, reference):
    model = subject(name, tiny)
    compare.batched(reference, Call(model, {"do_sample": True, **OPTIONS[option]}, seed=11), ragged(model))


@pytest.mark.parametrize("name", NAMES)
def test_repetition_penalty_alone(name, tiny, reference):
    """The reference penalises padding, so the rows run alone."""
    model = subject(name, tiny)
    arguments = {"do_sample": True, "repetition_penalty": 1.3, "top_p": 0.9, "max_new_tokens": NEW}
    compare.alone(reference, Call(model, arguments, seed=13), ragged(model))
