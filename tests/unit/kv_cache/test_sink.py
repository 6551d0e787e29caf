"""Attention sinks: visible positions, and outputs against a recomputed cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from descant import GenerationConfig, Request, Session
from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.sink_window import SinkStore
from descant.models.forward.rope import rope_of_model
from descant.testing import Schedule
from descant.testing.outcome import outcomes
from tests.support.tiny_models import prompts
from tests.unit.kv_cache.known import Known
from tests.unit.kv_cache.recency import drilled

LENGTH, SINKS = 9, 2


def turned(keys, shift):
    """Keys [N, ..., D] moved on by a number of positions each of the first, in halves."""
    half = keys.shape[-1] // 2
    speed = 1.0 / 100.0 ** (torch.arange(half) / half)
    angle = torch.as_tensor(shift).double().view(-1, *[1] * (keys.ndim - 1)) * speed
    cos, sin = angle.cos().float(), angle.sin().float()
    one, two = keys[..., :half], keys[..., half:]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


@pytest.mark.ci_cases("3-2-1-1", "4-0-2-3")
@pytest.mark.parametrize(
    ("length", "sinks", "slack", "room"), [(6, 2, 0, 1), (5, 1, 3, 2), (4, 0, 2, 3), (3, 2, 1, 1)], ids=str
)
def test_sinks_show_what_lists_would(length, sinks, slack, room):
    def rule(layer, start):
        forgotten = max(0, start - (length - 1))
        head = [(at, forgotten) for at in range(min(sinks, start))]
        return head + [(at, 0) for at in range(sinks + forgotten, start)]

    drilled(
        lambda: SinkStore(length, sinks, turned, slack, room),
        2,
        rule,
        lambda key, shift: turned(key[None, :, None], [shift])[0, :, 0],
    )


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafts_change_nothing(tiny, attention):
    """Each of several queries that are fed at once has the window that it has alone."""
    one = tiny("llama", attn_implementation=attention)
    texts = prompts(one.arch, [4, 17, 30], 3)
    plain = GenerationConfig(max_new_tokens=60, eos_token_id=None)
    guessed = plain.replace(num_assistant_tokens=5, num_assistant_tokens_schedule="constant")

    def output_of(config, drafter=None):
        # Longer than what is tried along with a prompt, which counts as the prompt does.
        store = SinkStore(12, SINKS, rope_of_model(one.model), slack=3, room=4)
        asked = [Request(text, config, assistant_model=drafter) for text in texts]
        return outcomes(one.model, asked, cache=store)

    alone = output_of(plain)
    whole = [[*text, *found.tokens[0]] for text, found in zip(texts, alone, strict=True)]
    for expected, found in zip(alone, output_of(guessed, Known(whole)), strict=True):
        assert found.tokens == expected.tokens
        assert found.hypotheses[0].speculation.saved_forwards > 20
        assert found.tokens == expected.tokens
        for prefix, line in found.logits.items():
            assert torch.allclose(expected.logits[prefix], line, rtol=0.0, atol=1e-4)


def test_memory_does_not_grow(tiny):
    one = tiny("llama")
    store = SinkStore(LENGTH, SINKS, rope_of_model(one.model), slack=8, room=8)
    session = Session(one.model, cache=store)
    session.admit(
        *(
            Request(text, GenerationConfig(max_new_tokens=300, eos_token_id=None))
            for text in prompts(one.arch, [4, 40], 3)
        )
    )
    sizes = []
    while len(session):
        list(session.step())
        sizes.append(store.nbytes)
    config = one.model.config
    slot = 2 * 2 * config.num_key_value_heads * config.head_dim * 4  # keys and values, two layers
    assert max(sizes) <= 2 * (LENGTH - 1 + 8 + 8) * slot
    assert len(sizes) == 300


def test_a_row_is_cut_no_further_than_it_can_go_on():
    store = SinkStore(6, 2, turned, slack=4, room=1)
    store.extend(1)
    for start in range(30):
        block = torch.randn(1, 2, 1, 4)
        store.update(0, block, block, KVSpan(None, start, 1, start + 1))
        store.commit(None, torch.tensor([start + 1]))
    store.commit(None, torch.tensor([26]))
    with pytest.raises(InputError, match=r"must be >= .* for row 0"):
        store.commit(None, torch.tensor([10]))


@pytest.mark.parametrize(("length", "sinks"), [(4, 4), (0, 0), (3, -1)])
def test_a_window_has_room_besides_its_sinks(length, sinks):
    with pytest.raises(InputError):
        SinkStore(length, sinks, None)
