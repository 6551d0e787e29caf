"""DoLa of a ragged batch equals the reference's run of each row alone.

Alone, because the reference chooses one layer for its whole batch; see `test_method_bugs.py`. The models are
deeper than elsewhere: 5 to 8 layers, and two of more than 40, where the layers of "low" and "high" differ.
"""

from __future__ import annotations

from itertools import product

import pytest

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import DEEP, five

NEW = 10
LAYERS = {
    "low": "low",
    "high": "high",
    "the embeddings": [0],
    "two": [1, 3],
    "three": [0, 2, 4],
    "out of order": [4, 1, 2],
}
# Prompt seeds with which the reference chooses layers and tokens by 3e-5 or more.
SEEDS = {
    "llama": (401, 400, 402),
    "gpt2": (400,),
    "gpt-neox": (401, 400, 402),
    "mistral": (403, 401, 402),
    "qwen2": (408,),
    "gemma": (401, 402, 406),
    "opt": (402, 400, 404),
}
# In CI the two deepest only take what their depth changes.
SHOWN = {name: ("low", "high") if DEEP[name][0] > 40 else tuple(LAYERS) for name in DEEP}
EVERY = [
    one if not one[2] and one[1] in SHOWN[one[0]] else pytest.param(*one, marks=pytest.mark.slow)
    for name in DEEP
    for one in product([name], LAYERS, range(len(SEEDS[name])))
]
FEW = ("llama", "gemma")
SOME = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in DEEP if name not in FEW)]


def prompts(model, name, turn=0):
    return five(model, SEEDS[name][turn])


def case(layers, **more):
    return {"dola_layers": LAYERS[layers], "max_new_tokens": NEW, **more}


@pytest.mark.parametrize(("name", "layers", "turn"), EVERY)
def test_ragged_rows(name, layers, turn, deep, reference):
    model = deep(name)
    compare.by_row(reference, Call(model, case(layers)), prompts(model, name, turn))


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 8},
    "several end tokens": {"eos_token_id": [2, 7, 30, 31, 32, 33]},
}


# DoLa leaves only the end token to some row here, and `min_new_tokens` rules it out. 4.52.4 then takes
# token 0, the first of scores that are all -inf.
ONLY_THE_END = {("mistral", "min_new_tokens"), ("qwen2", "min_new_tokens")}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SOME)
def test_option(name, option, deep, reference):
    model = deep(name)
    call = Call(model, case("high", **OPTIONS[option]))
    if (name, option) in ONLY_THE_END:
        with pytest.raises(descant.RowError, match="`min_new_tokens` must leave enough to choose from"):
            compare.by_row(reference, call, prompts(model, name))
        return
    compare.by_row(reference, call, prompts(model, name))


SAMPLERS = {"defaults": {}, "temperature and top_p": {"temperature": 1.5, "top_p": 0.9}}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("layers", ["low", "high", "three"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-neox"])
def test_sampling(name, layers, sampler, deep, reference):
    """Under the same torch seed; rows alone on both sides, since a batch shares its noise and its layer."""
    model = deep(name)
    call = Call(model, case(layers, do_sample=True, **SAMPLERS[sampler]), seed=3)
    compare.alone(reference, call, prompts(model, name))


@pytest.mark.parametrize("name", SOME)
def test_sampled_batch(name, deep, reference):
    """From one layer, of which the reference has no choice: a batch on both sides."""
    model = deep(name)
    call = Call(model, case("the embeddings", do_sample=True), seed=5)
    compare.batched(reference, call, prompts(model, name))
