"""The rotation of keys: measured, derived from a config, and equal."""

from __future__ import annotations

import pytest
import torch
import transformers

from descant.core.interfaces import KVSpan
from descant.kv_cache.stores.dense import DenseStore
from descant.models.forward.encoder import SelfAttentionView
from descant.models.forward.rope import RopeShift, rope_from_config, rope_of_model
from tools.sweep.catalogue import entries
from tools.sweep.trial import subject_of

# One model for each kind of rotation: number of pairs, interleaved or not, direction.
TURNED = {
    "LlamaForCausalLM": (4, False, 1),
    "GPTNeoXForCausalLM": (1, False, 1),  # a part of each head
    "PhiForCausalLM": (2, False, 1),
    "GPTJForCausalLM": (2, True, 1),  # interleaved, frequencies in a table
    "CohereForCausalLM": (4, True, 1),
    "GlmForCausalLM": (2, True, 1),
    "NanoChatForCausalLM": (4, False, -1),  # the other way round
    "Qwen3ForCausalLM": (4, False, 1),
    "ApertusForCausalLM": (4, False, 1),  # stretched by a rule (llama3)
}
# Positions that are not rotary, not only, or not in the keys.
NOT = [
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "Phi3ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MambaForCausalLM",
]


def model_of(name):
    return subject_of(next(entry for entry in entries() if entry.name == name)).model


def keys_at(model, tokens, positions):
    """The keys of every layer for one line of tokens, each at its position."""
    cache = DenseStore()
    cache.extend(1)
    view = SelfAttentionView(cache, KVSpan(None, 0, len(tokens), len(tokens)))
    with torch.no_grad():
        model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            past_key_values=view,
            use_cache=True,
        )
    cache.commit(None, torch.tensor([len(tokens)]))
    return [cache.read(layer, torch.tensor([0]))[0] for layer in cache.layers]


@pytest.mark.parametrize("name", TURNED)
def test_keys_are_turned_as_the_model_does(name):
    """A text that is read some positions further on has the keys of the first, turned by so much."""
    model = model_of(name)
    turn = rope_of_model(model)
    pairs, paired, way = TURNED[name]
    assert isinstance(turn, RopeShift)
    assert (len(turn.inv_freq), turn.interleaved) == (pairs, paired)
    assert bool((turn.inv_freq * way > 0).all())
    tokens = [40, 41, 50, 60, 45]
    for first, second in zip(
        keys_at(model, tokens, [0, 1, 2, 3, 4]), keys_at(model, tokens, [71, 72, 73, 74, 75]), strict=True
    ):
        assert torch.allclose(turn(first, torch.tensor([71])), second, rtol=0.0, atol=2e-4)
        assert torch.allclose(turn(second, torch.tensor([-71])), first, rtol=0.0, atol=2e-4)
        assert not torch.allclose(first, second, rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("name", TURNED)
def test_a_config_tells_the_same(name):
    model = model_of(name)
    found, from_config = rope_of_model(model), rope_from_config(model.config)
    assert isinstance(from_config, RopeShift)
    assert (from_config.interleaved, from_config.rotates_last_dims) == (
        found.interleaved,
        found.rotates_last_dims,
    )
    assert torch.allclose(from_config.inv_freq, found.inv_freq)


@pytest.mark.parametrize("name", NOT)
def test_what_cannot_be_turned(name):
    assert rope_of_model(model_of(name)) is None


@pytest.mark.parametrize("name", ["HunYuanDenseV1ForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel"])
def test_a_config_without_a_known_rotation_gives_none(name):
    assert rope_from_config(model_of(name).config) is None


def test_layers_that_do_not_turn():
    """Some layers of SmolLM3 have no positions."""
    model = model_of("SmolLM3ForCausalLM")
    for turns in (rope_of_model(model), rope_from_config(model.config)):
        assert [turn is None for turn in turns] == [False, True]


def test_layers_that_turn_at_different_speeds():
    turns = rope_of_model(model_of("Gemma3ForCausalLM"))
    speeds = {tuple(turn.inv_freq.tolist()) for turn in turns}
    assert len(speeds) == 2
    assert rope_from_config(model_of("Gemma3ForCausalLM").config) is None


def test_a_model_is_tried_once_and_left_as_it_was(tiny):
    model = transformers.AutoModelForCausalLM.from_config(tiny("llama").model.config).eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = {name: one.clone() for name, one in (*model.named_parameters(), *model.named_buffers())}
    seed = torch.random.get_rng_state()
    assert rope_of_model(model) is rope_of_model(model)
    assert calls == [1]
    assert torch.equal(seed, torch.random.get_rng_state())
    assert all(
        torch.equal(one, before[name]) for name, one in (*model.named_parameters(), *model.named_buffers())
    )


def test_half_precision_finds_the_same(tiny):
    whole = rope_of_model(tiny("llama").model)
    half = rope_of_model(model_of("LlamaForCausalLM").to(torch.bfloat16))
    assert (half.interleaved, half.rotates_last_dims, len(half.inv_freq)) == (
        whole.interleaved,
        whole.rotates_last_dims,
        len(whole.inv_freq),
    )


def test_far_positions_are_turned_exactly():
    turn = RopeShift(torch.tensor([1.0, 0.1]))
    keys = torch.randn(3, 2, 1, 4)
    far = torch.tensor([1_000_003, 5, 0])
    there = turn(keys, far)
    assert torch.allclose(turn(there, -far), keys, atol=1e-6)
    assert torch.equal(there[2], keys[2])
    angle = 1_000_003 % (2 * torch.pi)
    cos, sin = torch.tensor(angle, dtype=torch.float64).cos(), torch.tensor(angle, dtype=torch.float64).sin()
    assert torch.allclose(
        there[0, :, 0, 0], (keys[0, :, 0, 0] * cos - keys[0, :, 0, 2] * sin).float(), atol=1e-5
    )
