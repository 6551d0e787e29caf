"""Classifier-free guidance of a ragged batch equals the reference's run of each row alone.

Alone, because the reference counts the padding of negative prompts as positions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import ENCODER_DECODER, TINY, five
from tests.support.tiny_models import prompts

NEW = 12
NAMES = tuple(name for name in TINY if name not in ENCODER_DECODER)
SCALES = (0.5, 1.5, 3.0)
# Prompt seeds with which the reference chooses by 1e-4 or more under every setting.
SEEDS = {name: (600, 601, 603 if name == "opt" else 602) for name in NAMES}
TURNS = [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))]
FEW = ("gpt2", "opt")
SOME = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in FEW)]


def guided(model, negative, turn=0):
    """Five ragged prompts, with optional negative ones of other lengths."""
    seed = SEEDS[model.name][turn]
    rows = five(model, seed)
    return (
        replace(rows, negatives=prompts(model.arch, (4, 2, 7, 1, 5), seed=seed + 1000)) if negative else rows
    )


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows(name, scale, negative, turn, tiny, reference):
    """Tokens, guided scores and the network's own logits; without a negative prompt, by the last token."""
    model = tiny(name)
    arguments = {"guidance_scale": scale, "max_new_tokens": NEW}
    compare.by_row(reference, Call(model, arguments), guided(model, negative, turn))


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 9},
    "several end tokens": {"eos_token_id": [2, 7, 30, 31, 32, 33]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
    "renormalize_logits": {"renormalize_logits": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SOME)
def test_option(name, option, tiny, reference):
    model = tiny(name)
    arguments = {"guidance_scale": 1.5, "max_new_tokens": NEW, **OPTIONS[option]}
    compare.by_row(reference, Call(model, arguments), guided(model, True))


SAMPLERS = {"defaults": {}, "temperature and top_p": {"temperature": 1.5, "top_p": 0.9}}


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", SOME)
def test_sampling(name, sampler, negative, tiny, reference):
    """Under the same torch seed, rows alone on both sides."""
    model = tiny(name)
    arguments = {"guidance_scale": 1.5, "do_sample": True, "max_new_tokens": NEW, **SAMPLERS[sampler]}
    compare.alone(reference, Call(model, arguments, seed=7), guided(model, negative))


@pytest.mark.parametrize("name", SOME)
def test_several_sequences(name, tiny, reference):
    model = tiny(name)
    arguments = {"guidance_scale": 1.5, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW}
    compare.alone(reference, Call(model, arguments, seed=7), guided(model, False))
