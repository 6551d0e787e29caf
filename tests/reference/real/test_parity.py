"""SmolLM2-135M and a pretrained T5 give the reference's tokens: greedy, sampled and from four beams."""

from __future__ import annotations

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call, batch
from tests.reference.real.prompts import ARTICLES, PROMPTS

SLOW = pytest.mark.slow
NEW = 64
GROUPS = [PROMPTS[start : start + 7] for start in range(0, len(PROMPTS), 7)]
SIXES = [PROMPTS[start : start + 6] for start in range(0, len(PROMPTS), 6)]
# Each group takes a minute, most of it the reference's. CI runs a few prompts of different length.
FEW, FEW_NEW = PROMPTS[3:6], 12


def prompts(model, texts):
    return batch(model, [model.tokens(text) for text in texts])


def test_there_are_forty_prompts():
    assert len(set(PROMPTS)) >= 40
    assert sum(map(len, GROUPS)) == sum(map(len, SIXES)) == len(PROMPTS)


def check_greedy(reference, model, texts, new):
    call = Call(model, {"max_new_tokens": new}, full=False)
    compare.batched(reference, call, prompts(model, texts))


def test_greedy(real, reference):
    check_greedy(reference, real("smollm2"), FEW, 20)


@SLOW
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_greedy_on_all_prompts(group, real, reference):
    check_greedy(reference, real("smollm2"), GROUPS[group], NEW)


SAMPLERS = ({}, {"temperature": 0.7, "top_p": 0.9}, {"min_p": 0.05, "top_k": 0})


def check_sampling(reference, model, texts, new, seed):
    arguments = {"do_sample": True, "max_new_tokens": new, **SAMPLERS[seed % len(SAMPLERS)]}
    compare.batched(reference, Call(model, arguments, seed=seed, full=False), prompts(model, texts))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
def test_sampling(seed, real, reference):
    check_sampling(reference, real("smollm2"), FEW, FEW_NEW, seed)


@SLOW
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_sampling_on_all_prompts(group, real, reference):
    check_sampling(reference, real("smollm2"), GROUPS[group], NEW, group)


def check_beams(reference, model, texts, new):
    arguments = {"num_beams": 4, "max_new_tokens": new}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, texts))


@SLOW
def test_beams(real, reference):
    check_beams(reference, real("smollm2"), FEW[:2], FEW_NEW)


@SLOW
@pytest.mark.parametrize("group", range(len(SIXES)))
def test_beams_on_all_prompts(group, real, reference):
    check_beams(reference, real("smollm2"), SIXES[group], NEW)


def test_scores_over_the_whole_vocabulary(real, reference):
    model = real("smollm2")
    some = prompts(model, PROMPTS[:3])
    compare.batched(reference, Call(model, {"max_new_tokens": 8}), some)
    compare.by_row(reference, Call(model, {"num_beams": 2, "max_new_tokens": 8}), some)


T5 = "flan-t5-small-titles"
T5_SETTINGS = {
    "beams": {"num_beams": 4},
    "beams, several": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "beams, long": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
}


def test_t5_greedy(real, reference):
    model = real(T5)
    answers = compare.batched(
        reference, Call(model, {"max_new_tokens": 32}, full=False), prompts(model, ARTICLES)
    )
    assert len({len(a.tokens[0]) for a in answers}) > 3, "titles of different length"


@pytest.mark.parametrize("seed", range(len(SAMPLERS)))
def test_t5_sampling(seed, real, reference):
    model = real(T5)
    arguments = {"do_sample": True, "max_new_tokens": 32, **SAMPLERS[seed]}
    compare.batched(reference, Call(model, arguments, seed=seed, full=False), prompts(model, ARTICLES))


@pytest.mark.parametrize("setting", [pytest.param("beams", marks=SLOW), "beams, several", "beams, long"])
def test_t5_beams(setting, real, reference):
    model = real(T5)
    arguments = {"max_new_tokens": 32, **T5_SETTINGS[setting]}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, ARTICLES[:4]))


def test_t5_scores_over_the_whole_vocabulary(real, reference):
    model = real(T5)
    compare.batched(reference, Call(model, {"max_new_tokens": 8}), prompts(model, ARTICLES[:3]))
