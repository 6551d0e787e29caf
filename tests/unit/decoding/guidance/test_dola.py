"""DoLa against a reference that recomputes the whole text and every layer separately."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
from descant import ConfigError, GenerationConfig, Request
from descant.core.interfaces import ModelTraits
from descant.decoding.guidance import early_layers
from descant.testing import outcomes, toy
from tests.support.json_tokenizer import tokenizer
from tests.support.tiny_models import Tiny, pad, prompts

NEW = 8
NEAR = {"rtol": 0.0, "atol": 5e-4}
NAMES = ("llama", "gpt2", "qwen2")


# ------------------------------------------------------------------------ the reference
@torch.no_grad()
def contrast(tiny: Tiny, text: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The contrast after a text [V], and the model's own logits."""
    said = tiny.model(torch.tensor([list(text)]), output_hidden_states=True)
    head = tiny.model.get_output_embeddings()
    last = said.logits[0, -1].log_softmax(-1)
    early = [head(said.hidden_states[layer][0, -1]).log_softmax(-1) for layer in layers]
    base = max(early, key=lambda one: divergence(one, last))
    found = last - base
    found[last < last.max() + math.log(0.1)] = -torch.inf
    return found, said.logits[0, -1]


def divergence(one: Tensor, two: Tensor) -> float:
    """How far two predictions are from their mean, as 4.52.4 takes it."""
    mean = (one.exp() + two.exp()) / 2
    return float((mean * (mean.log() - one)).sum() + (mean * (mean.log() - two)).sum()) / 2


def greedy(tiny: Tiny, prompt: Sequence[int], layers: Sequence[int]) -> list[int]:
    new: list[int] = []
    for _ in range(NEW):
        new.append(int(contrast(tiny, [*prompt, *new], layers)[0].argmax()))
    return new


def call(tiny: Tiny, rows: list[list[int]], **fields: Any) -> Any:
    ids, mask = pad(rows, tiny.arch.pad, "left")
    found = descant.generate(
        tiny.model, ids, attention_mask=mask, **{"max_new_tokens": NEW, "eos_token_id": None, **fields}
    )
    new = (found.sequences if isinstance(found, dict) else found)[:, ids.shape[1] :]
    return new.tolist(), found


def rows_of(tiny: Tiny, seed: int = 60) -> list[list[int]]:
    return prompts(tiny.arch, (7, 2, 12), seed)


def named(tiny: Tiny, layers: Any) -> list[int]:
    """What the documented tables say for these models of two or three layers."""
    count = int(tiny.model.config.num_hidden_layers)
    tied = bool(tiny.model.config.tie_word_embeddings)
    return {
        ("low", 2, False): [0],
        ("low", 2, True): [1],
        ("low", 3, False): [0],
        ("high", 2, False): [1],
        ("high", 2, True): [1],
        ("high", 3, False): [1],
    }[layers, count, tied] if isinstance(layers, str) else layers  # fmt: skip


# ------------------------------------------------------------------------ layers
FACTS = ModelTraits(
    is_encoder_decoder=False,
    supports_position_ids=True,
    supports_logits_to_keep=True,
    supports_inputs_embeds=True,
    vocab_size=9,
    num_layers=0,
    attn_implementation="sdpa",
    sliding_windows={},
    max_positions=None,
    context_length=None,
)

TABLE = [
    # layers, tied, "low", "high"
    (12, False, [0, 2, 4], [6, 8, 10]),
    (12, True, [2, 4], [6, 8, 10]),
    (24, False, list(range(0, 12, 2)), list(range(12, 24, 2))),
    (32, False, list(range(0, 16, 2)), list(range(16, 32, 2))),
    (32, True, list(range(2, 16, 2)), list(range(16, 32, 2))),
    (40, False, list(range(0, 20, 2)), list(range(20, 40, 2))),
    (40, True, list(range(2, 20, 2)), list(range(20, 40, 2))),
    (41, False, list(range(0, 20, 2)), list(range(21, 41, 2))),
    (41, True, list(range(2, 20, 2)), list(range(21, 41, 2))),
    (48, False, list(range(0, 20, 2)), list(range(28, 48, 2))),
    (80, True, list(range(2, 20, 2)), list(range(60, 80, 2))),
    (5, False, [0], [2, 4]),
    (5, True, [2], [2, 4]),
    (4, True, [2], [2]),
    (2, False, [0], [1]),
    (2, True, [1], [1]),
    (1, False, [0], [0]),
    (1, True, [0], [0]),
]


@pytest.mark.parametrize(("count", "tied", "low", "high"), TABLE)
def test_the_documented_layers(count, tied, low, high):
    facts = dataclasses.replace(FACTS, num_layers=count, has_tied_embeddings=tied)
    assert early_layers("low", facts) == low
    assert early_layers("high", facts) == high


@pytest.mark.parametrize("tied", [False, True])
def test_there_is_always_an_early_layer(tied):
    for count, name in product(range(1, 100), ("low", "high")):
        layers = early_layers(name, dataclasses.replace(FACTS, num_layers=count, has_tied_embeddings=tied))
        assert layers
        assert layers == sorted(set(layers))
        assert all(0 <= layer < count for layer in layers)
        assert 0 not in layers or not tied or count == 1


def test_layers_by_number():
    facts = dataclasses.replace(FACTS, num_layers=6)
    assert early_layers([4, 0, 4, 2], facts) == [0, 2, 4]
    assert early_layers([1, 6], facts) == [1]  # the last layer does not differ from itself
    with pytest.raises(ConfigError, match="`dola_layers` must name layers up to the last, 6, got 7"):
        early_layers([1, 7], facts)
    with pytest.raises(ConfigError, match=r"`dola_layers` must name a layer below the last, 6, got \[6\]"):
        early_layers([6], facts)


# ------------------------------------------------------------------------ tokens
@pytest.mark.parametrize("layers", ["low", "high", [0], [0, 1], [1]])
@pytest.mark.parametrize("name", NAMES)
def test_greedy(tiny, name, layers):
    model = tiny(name)
    rows = rows_of(model)
    found, _ = call(model, rows, dola_layers=layers)
    assert found == [greedy(model, row, named(model, layers)) for row in rows]
    assert found != call(model, rows)[0]


def test_the_farthest_layer_is_chosen_anew_at_every_place(tiny):
    """Precondition of the tests above: with two layers neither is always the one."""
    model = tiny("qwen2")
    row = rows_of(model)[0]
    both = greedy(model, row, [0, 1, 2])
    assert both not in [greedy(model, row, [layer]) for layer in range(3)]


def test_a_guided_neighbour_hides_no_parameter():
    """A grammar may permit none but tokens that the last layer finds implausible."""
    config = GenerationConfig(max_new_tokens=8, dola_layers="high", grammar={"choice": ["abab", "name"]})
    one = Request([70, 71, 72], config, tokenizer=tokenizer())
    guided = Request([70], GenerationConfig(max_new_tokens=8, guidance_scale=2.0))
    found = outcomes(toy(276), [one, guided])
    assert found[0].error is None
    assert found[0].tokens == outcomes(toy(276), [one])[0].tokens


@pytest.mark.parametrize("beams", [1, 3])
def test_logits_are_the_networks_own(tiny, beams):
    model = tiny("llama")
    rows = rows_of(model)
    found, record = call(
        model, rows, dola_layers=[0, 1], num_beams=beams, repetition_penalty=1.3, logprobs=2,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    for line, row in enumerate(rows):
        for at in range(NEW):
            at_line = line if beams == 1 else int(record.beam_indices[line, at])
            law, own = contrast(model, [*row, *found[line][:at]], [0, 1])
            torch.testing.assert_close(record.logits[at][at_line], own, **NEAR)
            raw = float(own.log_softmax(-1)[found[line][at]])
            assert float(record.logprobs[line].raw[at]) == pytest.approx(raw, abs=1e-3)
            if beams == 1:
                seen = sorted({*row, *found[line][:at]})
                law[seen] = torch.where(law[seen] > 0, law[seen] / 1.3, law[seen] * 1.3)
                torch.testing.assert_close(record.scores[at][line], law, **NEAR)


@pytest.mark.parametrize("layers", ["low", [0, 1]])
def test_sampling_draws_from_the_contrast(tiny, layers):
    model = tiny("llama")
    rows = rows_of(model)
    found, record = call(
        model, rows, dola_layers=layers, do_sample=True, temperature=2.0, top_k=0, seed=5,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for line, row in enumerate(rows):
        for at, token in enumerate(found[line]):
            law = contrast(model, [*row, *found[line][:at]], named(model, layers))[0] / 2.0
            torch.testing.assert_close(record.scores[at][line], law, **NEAR)
            assert law[token] > -torch.inf


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beams(tiny, name):
    """Beam search by hand on the contrast, without ends: the same hypotheses with the same scores."""
    model = tiny(name)
    rows = rows_of(model)
    found, record = call(
        model, rows, dola_layers=[0, 1], num_beams=3, num_return_sequences=3, length_penalty=1.0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for line, row in enumerate(rows):
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(NEW):
            options = []
            for total, new in beams:
                shares = contrast(model, [*row, *new], [0, 1])[0].log_softmax(-1)
                options += [
                    (total + float(shares[token]), [*new, token])
                    for token in torch.nonzero(shares > -torch.inf).flatten().tolist()
                ]
            beams = sorted(options, key=lambda one: -one[0])[:3]
        assert found[3 * line : 3 * line + 3] == [new for _, new in beams]
        scores = [total / NEW for total, _ in beams]
        assert record.sequences_scores[3 * line : 3 * line + 3].tolist() == pytest.approx(scores, abs=1e-4)


# ------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5", {"dola_layers": "low"}, "`dola_layers` is not supported for a model with an encoder"),
        ("llama", {"dola_layers": [2]}, r"`dola_layers` must name a layer below the last, 2, got \[2\]"),
        ("llama", {"dola_layers": [0, 3]}, "`dola_layers` must name layers up to the last, 2, got 3"),
        ("llama", {"dola_layers": "mid"}, "`dola_layers` must be"),
        (
            "llama",
            {"dola_layers": "low", "guidance_scale": 2.0},
            "`dola_layers` cannot be combined with `guidance_scale`",
        ),
    ],
)
def test_refusals(tiny, name, fields, message):
    with pytest.raises(ConfigError, match=message):
        call(tiny(name), rows_of(tiny(name)), **fields)


def test_neutral_guidance_is_no_guidance(tiny):
    model = tiny("llama")
    rows = rows_of(model)
    assert (
        call(model, rows, dola_layers="low", guidance_scale=1.0)[0] == call(model, rows, dola_layers="low")[0]
    )
