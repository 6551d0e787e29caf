"""SmolLM2-135M and a pretrained T5 give the reference's tokens by every method.

The reference runs row by row, since few of these methods are neutral in its batches; prompts are few because
it is slow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call, batch
from tests.reference.real.prompts import ARTICLES, PROMPTS

SLOW = pytest.mark.slow
SMOL, T5 = "smollm2", "flan-t5-small-titles"
NEW = 10


def prompts(model, texts):
    return batch(model, [model.tokens(text) for text in texts])


def few(count, start=0, shown=False):
    """So many prompts at a time; in CI the first, unless a test below compares the method's scores too."""
    return [pytest.param(n, marks=() if shown and n == start else SLOW) for n in range(start, 12, count)]


def words(model, *texts):
    """Token ids of words in running text."""
    return [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.mark.parametrize("start", few(2))
@pytest.mark.parametrize(("width", "alpha"), [(4, 0.6), pytest.param(6, 0.3, marks=SLOW)])
def test_contrastive(width, alpha, start, real, reference):
    model = real(SMOL)
    arguments = {"top_k": width, "penalty_alpha": alpha, "max_new_tokens": NEW}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, PROMPTS[start : start + 2]))


@pytest.mark.parametrize("start", few(2))
@pytest.mark.parametrize("layers", ["low", pytest.param("high", marks=SLOW), [0, 20]], ids=str)
def test_dola(layers, start, real, reference):
    """The model's middle layers are certain, and all but differ from the last by ln 2.

    Which of "low" and "high" is taken then hangs on the last bits, and on these prompts both sides agree.
    """
    model = real(SMOL)
    arguments = {"dola_layers": layers, "repetition_penalty": 1.2, "max_new_tokens": NEW}
    call = Call(model, arguments, full=False, ties=isinstance(layers, str))
    compare.by_row(reference, call, prompts(model, PROMPTS[start : start + 2]))


def test_dola_sampled(real, reference):
    model = real(SMOL)
    arguments = {"dola_layers": [0, 20], "do_sample": True, "top_p": 0.9, "max_new_tokens": NEW}
    compare.alone(reference, Call(model, arguments, seed=1, full=False), prompts(model, PROMPTS[:2]))


@pytest.mark.parametrize("start", few(2))
@pytest.mark.parametrize(("groups", "penalty"), [(3, 1.0), pytest.param(2, 5.0, marks=SLOW)])
def test_diverse(groups, penalty, start, real, reference):
    model = real(SMOL)
    arguments = {
        "num_beams": 6,
        "num_beam_groups": groups,
        "diversity_penalty": penalty,
        "num_return_sequences": 3,
        "max_new_tokens": NEW,
    }
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, PROMPTS[start : start + 2]))


@pytest.mark.parametrize("start", few(2, shown=True))
@pytest.mark.parametrize("kind", [pytest.param("phrases", marks=SLOW), "alternatives"])
def test_constrained(kind, start, real, reference):
    model = real(SMOL)
    forced = words(model, " hummingbird", " violin lesson")
    if kind == "alternatives":
        forced = [forced, *words(model, " teapot")]
    arguments = {"num_beams": 5, "force_words_ids": forced, "max_new_tokens": 16}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, PROMPTS[start : start + 2]))


@pytest.mark.parametrize("start", few(2))
@pytest.mark.parametrize("scale", [pytest.param(0.5, marks=SLOW), 1.5, pytest.param(3.0, marks=SLOW)])
def test_guidance(scale, start, real, reference):
    """With negative prompts for the stronger scales: not of one token, after which the model rounds badly."""
    model = real(SMOL)
    rows = prompts(model, PROMPTS[start : start + 2])
    if scale > 1:
        negatives = ("A sad story:", "Bad news for all of")
        rows = replace(rows, negatives=[model.tokens(text) for text in negatives])
    arguments = {"guidance_scale": scale, "max_new_tokens": NEW}
    compare.by_row(reference, Call(model, arguments, full=False), rows)


def test_scores_over_the_whole_vocabulary(real, reference):
    model = real(SMOL)
    some = prompts(model, PROMPTS[1:3])
    for arguments in (
        {"top_k": 4, "penalty_alpha": 0.6},
        {"dola_layers": [0, 20]},
        {"guidance_scale": 1.5},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    ):
        compare.by_row(reference, Call(model, {**arguments, "max_new_tokens": 4}), some)


@pytest.mark.parametrize(("width", "alpha"), [(4, 0.6), pytest.param(8, 0.2, marks=SLOW)])
def test_t5_contrastive(width, alpha, real, reference):
    model = real(T5)
    arguments = {"top_k": width, "penalty_alpha": alpha, "max_new_tokens": 16}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, ARTICLES[:3]))


@pytest.mark.parametrize(("groups", "penalty"), [(2, 1.0), pytest.param(3, 5.0, marks=SLOW)])
def test_t5_diverse(groups, penalty, real, reference):
    model = real(T5)
    arguments = {
        "num_beams": 6,
        "num_beam_groups": groups,
        "diversity_penalty": penalty,
        "num_return_sequences": 3,
        "max_new_tokens": 16,
    }
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, ARTICLES[:3]))


def test_t5_constrained(real, reference):
    model = real(T5)
    forced = words(model, "penguin", "castle")
    arguments = {"num_beams": 5, "force_words_ids": forced, "max_new_tokens": 16}
    compare.by_row(reference, Call(model, arguments, full=False), prompts(model, ARTICLES[:3]))
