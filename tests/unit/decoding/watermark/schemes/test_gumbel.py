"""The keyed uniforms: the same by every call, uniform, and independent of every other key."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
import torch
from scipy import stats

from descant.config.watermarking_config import GumbelWatermarkingConfig
from descant.decoding.watermark.gumbel import KeyedUniforms, get_keyed_uniforms

WORD = 2**32 - 1


# ------------------------------------------------------------------- the slow version
def mixed(word):
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)


def slow(key, width, nonce, context, token):
    """The 32 bits, in Python's integers."""
    secret = b"".join(
        blake2b(at.to_bytes(8, "little"), key=key.to_bytes(8, "little"), person=b"descant race").digest()
        for at in range(width + 4)
    )
    words = [int.from_bytes(secret[8 * at : 8 * at + 8], "little") for at in range(2 * width + 8)]
    given = [*context, nonce & WORD, nonce >> 32, 1]
    size = len(given)
    state = [
        (sum(one * factor for one, factor in zip(given, line, strict=True)) >> 32) & WORD
        for line in (words[2 : 2 + size], words[2 + size : 2 + 2 * size])
    ]
    sign = mixed(mixed((token * 0x9E3779B1 + words[0]) & WORD) ^ (words[1] & WORD))
    return mixed(((sign ^ state[0]) * (state[1] | 1)) & WORD)


def race(key=77, width=4):
    return KeyedUniforms(GumbelWatermarkingConfig(key, width))


def uniforms_of(one, contexts, nonce, tokens):
    """The uniforms of tokens [M] after contexts [M, W]."""
    return one.token_uniforms(one.context_states_on_host(np.asarray(contexts), nonce), np.asarray(tokens))


# ------------------------------------------------------------------- one answer
def test_chosen_tokens_equal_the_slow_version():
    rng = np.random.default_rng(1)
    for _ in range(60):
        key, width = int(rng.integers(2**63)), int(rng.integers(1, 12))
        nonce = int(rng.choice([0, 3, 2**31, 2**40 + 5, 2**63 - 1]))
        contexts = rng.integers(0, rng.choice([5, 2**18, 2**31]), (7, width))
        tokens = rng.integers(0, rng.choice([5, 2**18, 2**31]), 7)
        wanted = [
            slow(key, width, nonce, *one) for one in zip(contexts.tolist(), tokens.tolist(), strict=True)
        ]
        found = uniforms_of(race(key, width), contexts, nonce, tokens)
        assert found.tolist() == [(bits + 0.5) / 2**32 for bits in wanted]


def test_the_answers_are_those_of_yesterday():
    """A text that was marked must be found by every later version."""
    assert [slow(*one) for one in GOLDEN] == list(GOLDEN.values())
    for (key, width, nonce, context, token), bits in GOLDEN.items():
        assert uniforms_of(race(key, width), [context], nonce, [token]).tolist() == [(bits + 0.5) / 2**32]


GOLDEN = {
    (0, 1, 0, (0,), 0): 3874811895,
    (12345, 4, 7, (1, 2, 3, 4), 5): 1351471052,
    (12345, 4, 8, (1, 2, 3, 4), 5): 182919312,
    (2**63 - 1, 2, 2**63 - 1, (49151, 151935), 128000): 2512341607,
}


@pytest.mark.parametrize("vocabulary", [1, 10, 4099])
def test_the_whole_vocabulary_equals_its_tokens(vocabulary):
    one, rng = race(5, 3), np.random.default_rng(2)
    contexts = rng.integers(0, 60_000, (6, 3))
    states, words = one.context_states(torch.from_numpy(contexts), 9), one.context_states_on_host(contexts, 9)
    assert states.tolist() == words.tolist()
    whole = one.vocab_uniforms(states, vocabulary)
    assert [line.tolist() for line in one.iter_vocab_uniforms(words, vocabulary)] == whole.tolist()
    for line, word in zip(whole, words, strict=True):
        exact = one.token_uniforms(np.repeat(word[None], vocabulary, 0), np.arange(vocabulary))
        np.testing.assert_allclose(line.numpy(), exact, rtol=2**-22)


def test_a_nonce_for_each_line():
    one, nonces = race(6, 2), [0, 5, 0, 15, 2**20 - 1]
    contexts = torch.tensor([[3, 4]] * 5)
    found = one.context_states(contexts, torch.tensor(nonces)[:, None])
    assert found.tolist() == [one.context_states(contexts[:1], nonce)[0].tolist() for nonce in nonces]
    assert len({str(line) for line in found.tolist()}) == 4


def test_never_0_nor_1():
    """Where all bits are 0, and where all are 1."""
    one = race(8, 1)
    signs = one._token_words(torch.device("cpu"), 3).tolist()
    assert one.vocab_uniforms(torch.tensor([[signs[1], 1]]), 3)[0, 1] == 2.0**-33
    assert one.token_uniforms(np.array([[signs[1], 1]], np.uint32), np.array([1])).tolist() == [2.0**-33]
    last = unmixed(WORD)
    assert mixed(last) == WORD
    state = np.array([[signs[1] ^ last, 1]], np.uint32)
    assert one.token_uniforms(state, np.array([1])).tolist() == [1 - 2.0**-33]
    assert one.vocab_uniforms(torch.from_numpy(state.astype(np.int64)), 3)[0, 1] == 1.0


def unmixed(word):
    """What `mixed` makes this word of."""
    word ^= word >> 16
    word = word * pow(0xC2B2AE35, -1, 2**32) & WORD
    word ^= (word >> 13) ^ (word >> 26)
    word = word * pow(0x85EBCA6B, -1, 2**32) & WORD
    return word ^ (word >> 16)


def test_the_same_race_is_made_once():
    settings = GumbelWatermarkingConfig(3, 2, nonce=4)
    assert get_keyed_uniforms(settings) is get_keyed_uniforms(GumbelWatermarkingConfig(3, 2))
    assert get_keyed_uniforms(settings) is not get_keyed_uniforms(GumbelWatermarkingConfig(3, 3))


# ------------------------------------------------------------------- uniform and independent
COUNT = 100_000


def series(name):
    """Uniforms of a series in which one thing is counted up and all else stays."""
    rng = np.random.default_rng(3)
    contexts, tokens = np.repeat([[5, 6, 7]], COUNT, 0), np.full(COUNT, 11)
    if name == "token":
        tokens = np.arange(COUNT)
    elif name == "nonce":
        one = race(31, 3)
        states = one.context_states(torch.from_numpy(contexts), torch.arange(COUNT)[:, None])
        return one.token_uniforms(states.numpy().astype(np.uint32), tokens)
    elif name == "key":
        return np.concatenate(
            [uniforms_of(race(key, 3), contexts[:200], 2, np.arange(200)) for key in range(500)]
        )
    elif name == "chance":
        contexts = rng.integers(0, 50_000, (COUNT, 3))
    elif name == "walk":  # contexts that overlap, as those of a text do
        text = rng.integers(0, 300, COUNT + 3)
        contexts, tokens = np.lib.stride_tricks.sliding_window_view(text, 3)[:-1], text[3:]
        _, first = np.unique(contexts, axis=0, return_index=True)
        first.sort()
        contexts, tokens = contexts[first], tokens[first]
    else:
        contexts[:, int(name[-1])] = np.arange(COUNT)
    return uniforms_of(race(31, 3), contexts, 2, tokens)


@pytest.mark.parametrize("name", ["token", "nonce", "key", "chance", "walk", "place 0", "place 1", "place 2"])
def test_series_are_even_and_without_memory(name):
    found = series(name)
    assert stats.kstest(found, "uniform").pvalue > 0.001
    # Pairs at small distances fill the square evenly.
    for step in (1, 2, 7, 64, 200):
        first = np.flatnonzero(np.arange(len(found) - step) // step % 2 == 0)  # no number is in two pairs
        counts = np.histogram2d(found[first], found[first + step], bins=20, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > 0.001, step
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4.5 / len(found) ** 0.5


@pytest.mark.parametrize("change", ["key", "nonce", "order", "first token", "last token", "token"])
def test_whatever_changes_changes_the_chance(change):
    rng = np.random.default_rng(4)
    contexts, tokens = rng.integers(0, 500, (50_000, 3)), rng.integers(0, 500, 50_000)
    before = uniforms_of(race(31, 3), contexts, 2, tokens)
    others = contexts.copy()
    if change == "order":
        others = others[:, [1, 0, 2]]
    elif "token" in change and change != "token":
        others[:, 0 if change == "first token" else 2] += 1
    key, nonce = 32 if change == "key" else 31, 3 if change == "nonce" else 2
    after = uniforms_of(race(key, 3), others, nonce, tokens + (change == "token"))
    apart = contexts[:, 0] != contexts[:, 1]
    assert abs(np.corrcoef(before[apart], after[apart])[0, 1]) < 0.02
    counts = np.histogram2d(before[apart], after[apart], bins=12, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(counts.ravel()).pvalue > 0.001


def test_contexts_do_not_collide():
    contexts = np.stack(np.meshgrid(*[np.arange(60)] * 3), -1).reshape(-1, 3)
    words = race(31, 3).context_states_on_host(contexts, 2).astype(np.uint64)
    assert len(np.unique(words[:, 0] << np.uint64(32) | words[:, 1] | np.uint64(1))) == len(contexts)
