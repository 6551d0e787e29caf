"""Attention sinks: visible positions, and outputs against a recomputed cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from descant import GenerationConfig, Request
from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.sink_window import SinkStore
from descant.models.forward.rope import rope_of_model
from descant.testing import Schedule
from descant.testing.outcome import outcomes
from tests.support.tiny_models import prompts

LENGTH, SINKS = 9, 2


class Recounted:
    """A model with sinks by hand: what is kept is turned to its place in the cache, and so is the query."""

    def __init__(self, model, length=LENGTH, sinks=SINKS):
        self.model, self.length, self.sinks = model, length, sinks
        self.kept = []  # by layer: keys as if at position 0, and values [H, S, D]

    def turn(self, keys, places, way):
        """Keys [H, S, D] turned by their places [S], on or back."""
        rope = (
            self.model.gpt_neox.rotary_emb if hasattr(self.model, "gpt_neox") else self.model.model.rotary_emb
        )
        cos, sin = (one[0] for one in rope(keys, places[None]))
        size = cos.shape[-1]
        part, rest = keys[..., :size], keys[..., size:]
        half = torch.cat((-part[..., size // 2 :], part[..., : size // 2]), -1)
        return torch.cat((part * cos + way * half * sin, rest), -1)

    @torch.no_grad()
    def read(self, tokens):
        """The logits after tokens: a prompt, or one at a time."""
        if self.kept:
            size = min(self.kept[0][0].shape[1], self.length - 1)
            self.kept = [
                tuple(
                    torch.cat((one[:, : self.sinks], one[:, one.shape[1] - size + self.sinks :]), 1)
                    for one in pair
                )
                if pair[0].shape[1] > size
                else pair
                for pair in self.kept
            ]
        held = self.kept[0][0].shape[1] if self.kept else 0
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self.kept):
            cache.update(self.turn(keys, torch.arange(held), 1)[None], values[None], layer)
        places = torch.arange(held, held + len(tokens))
        said = self.model(
            input_ids=torch.tensor([tokens]), position_ids=places[None], past_key_values=cache, use_cache=True
        )
        new = [
            (self.turn(layer.keys[0, :, held:], places, -1), layer.values[0, :, held:])
            for layer in cache.layers
        ]
        old = self.kept or [(one[:, :0], two[:, :0]) for one, two in new]
        self.kept = [
            tuple(torch.cat(pair, 1) for pair in zip(before, after, strict=True))
            for before, after in zip(old, new, strict=True)
        ]
        return said.logits[0, -1]


def by_hand(model, prompt, count):
    """Greedy tokens, and the logits before each."""
    hand, tokens, seen, fed = Recounted(model), list(prompt), {}, list(prompt)
    for _ in range(count):
        logits = hand.read(fed)
        seen[tuple(tokens)] = logits
        fed = [int(logits.argmax())]
        tokens += fed
    return tokens[len(prompt) :], seen


@pytest.mark.ci_cases("llama-sdpa", "gpt-neox-eager")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_a_model_answers_as_by_hand(tiny, name, attention):
    """Prompts shorter and longer than the window, alone and in a ragged batch that grows on the way."""
    one = tiny(name, attn_implementation=attention)
    texts = prompts(one.arch, [4, 8, 9, 17, 30], 3)
    config = GenerationConfig(max_new_tokens=45, eos_token_id=None)
    asked = [Request(text, config) for text in texts]
    expected = [by_hand(one.model, text, 45) for text in texts]
    for schedule in (Schedule.at_once(range(5)), Schedule({0: [3, 1], 2: [0, 4], 11: [2]})):
        store = SinkStore(LENGTH, SINKS, rope_of_model(one.model), slack=3, room=4)
        for (tokens, logits), found in zip(
            expected, outcomes(one.model, asked, schedule, store), strict=True
        ):
            assert found.tokens == [tokens]
            assert found.logits.keys() == logits.keys()
            for prefix, line in logits.items():
                assert torch.allclose(found.logits[prefix], line, rtol=0.0, atol=1e-4)


def test_sinks_matter(tiny):
    """A window that is not turned, or has no sinks, gives other answers: the test above can fail."""
    one = tiny("llama")
    text = prompts(one.arch, [8], 3)[0]
    _, logits = by_hand(one.model, text, 20)
    for store in (SinkStore(LENGTH, SINKS, None), SinkStore(LENGTH, 0, rope_of_model(one.model))):
        config = GenerationConfig(max_new_tokens=20, eos_token_id=None)
        (found,) = outcomes(one.model, [Request(text, config)], cache=store)
        both = found.logits.keys() & logits.keys()
        assert max(float((found.logits[prefix] - logits[prefix]).abs().max()) for prefix in both) > 0.01


def test_eager_attention_has_the_window_of_each_of_several_queries(tiny):
    """Products with keys and values around a softmax are what torch's attention gives."""
    store, width = SinkStore(LENGTH, SINKS, rope_of_model(tiny("llama").model), slack=3, room=4), 3
    store.extend(2)
    for start in range(0, 40, width):
        key, value = torch.randn(2, 2, 2, width, 8)
        keys, values = store.update(0, key, value, KVSpan(None, start, width, start + width))
        store.commit(None, torch.full((2,), start + width))
    query = torch.randn(2, 2, width, 8)
    weights = (query @ keys.transpose(2, 3) / 8**0.5).softmax(-1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    torch.testing.assert_close(weights @ values, expected)
    assert (weights > 0).sum(-1).unique().tolist() == [LENGTH]


@pytest.mark.parametrize(("length", "sinks"), [(4, 4), (0, 0), (3, -1)])
def test_a_window_has_room_besides_its_sinks(length, sinks):
    with pytest.raises(InputError):
        SinkStore(length, sinks, None)
