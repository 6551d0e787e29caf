"""The Gumbel watermark is found, has the expected strength, and unmarked text has uniform p-values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from descant.config.watermarking_config import GumbelWatermarkingConfig
from descant.decoding.watermark.gumbel import GumbelScheme, GumbelWatermarkLogitsProcessor, KeyedUniforms

KEY = 4242


def scheme(key=KEY, width=4, nonce=0):
    return GumbelScheme(GumbelWatermarkingConfig(key, width), nonce)


def generate_texts(law, texts, tokens, key=KEY, width=4, nonce=0, seed=0):
    """Texts [N, L] of a writer who draws every token by one law [V], or by the key where that decides."""
    chance = torch.Generator().manual_seed(seed)
    processor = GumbelWatermarkLogitsProcessor(key, width, nonce)
    scores = torch.tensor(law).log().expand(texts, -1)
    ids = torch.empty(texts, 0, dtype=torch.long)
    for _ in range(tokens):
        marked = processor(ids, scores).softmax(-1)
        ids = torch.cat((ids, torch.multinomial(marked, 1, generator=chance)), 1)
    return ids.numpy()


def p_value(one, ids):
    found = one.score_tokens(ids)
    return one.p_value(int(found.mask.sum()), float(found.values.sum()))


FLAT = [1 / 300] * 300
STEEP = [0.7, *[0.3 / 99] * 99]


# ------------------------------------------------------------------- what a token is worth
def test_values_are_those_of_the_race():
    rng = np.random.default_rng(0)
    for width in (1, 2, 4):
        ids = rng.integers(0, 6, 60)
        one, race = scheme(width=width, nonce=3), KeyedUniforms(GumbelWatermarkingConfig(KEY, width))
        found = one.score_tokens(ids)
        seen = set()
        for place, token in enumerate(ids.tolist()):
            context = tuple(ids[max(place - width, 0) : place].tolist())
            fresh = len(context) == width and context not in seen
            seen.add(context)
            assert found.mask[place] == fresh
            wanted = 0.0
            if fresh:
                wanted = -np.log(
                    race.token_uniforms(
                        race.context_states_on_host(np.array([context]), 3), np.array([token])
                    )[0]
                )
            assert found.values[place] == wanted
        assert 0 < found.mask.sum() < 60


@pytest.mark.parametrize("count", range(6))
def test_texts_too_short_for_a_context(count):
    found = scheme().score_tokens(np.arange(count))
    assert found.mask.tolist() == [place >= 4 for place in range(count)]
    assert len(found.values) == count


def test_ids_of_any_kind():
    ids = np.random.default_rng(1).integers(0, 99, 40)
    wanted = [part.tolist() for part in scheme().score_tokens(ids)]
    for given in (ids.astype(np.int32), np.repeat(ids, 2)[::2], ids):
        found = scheme().score_tokens(given)
        assert [part.tolist() for part in found] == wanted
    found.mask[:] = False  # what a caller does to an answer is not what the next one gets
    assert [part.tolist() for part in scheme().score_tokens(ids)] == wanted


# ------------------------------------------------------------------- marked text
@pytest.mark.parametrize("width", [1, 2, 4])
def test_what_was_marked_is_scored_and_nothing_else(width):
    """The key determines the next token, exactly where the detector scores."""
    ids = generate_texts(STEEP, 20, 60, width=width)
    processor = GumbelWatermarkLogitsProcessor(KEY, width, 0)
    scores, sure = torch.tensor(STEEP).log()[None], 0
    for text in ids:
        found = scheme(width=width).score_tokens(text)
        for place, scored in enumerate(found.mask.tolist()):
            left = processor(torch.tensor(text[None, :place]), scores)
            assert scored == (not torch.equal(left, scores))
            if scored:
                assert left[0, text[place]] == 0.0
                sure += 1
    assert 100 < sure < 20 * 60


def worth(law):
    """The mean value of a raced token: of one with the chance p, the harmonic number of 1/p."""
    return sum(p * (special.digamma(1 / p + 1) + np.euler_gamma) for p in law)


@pytest.mark.parametrize("law", [FLAT, STEEP], ids=["flat", "steep"])
def test_marked_tokens_are_worth_what_they_should(law):
    """The mean of many texts, of the first place that is raced, where nothing hangs on what came before."""
    ids = generate_texts(law, 4000, 5, seed=2)
    contexts = {}
    for text in ids:
        found = scheme().score_tokens(text)
        contexts[tuple(text[:4])] = found.values[4]
    values = np.array(list(contexts.values()))
    assert len(values) > 2000 or law is STEEP
    assert abs(values.mean() - worth(law)) < 4.5 * values.std() / len(values) ** 0.5


def test_marked_texts_are_found_and_only_by_their_key_and_nonce():
    ids = generate_texts(STEEP, 60, 200, nonce=3)
    right = [p_value(scheme(nonce=3), text) for text in ids]
    assert np.mean(np.array(right) < 1e-6) > 0.95
    # A different key for each text: texts that share contexts have correlated scores.
    strangers = [
        p_value(one, text)
        for at, text in enumerate(ids)
        for one in (scheme(nonce=4 + at), scheme(KEY + 1 + at, nonce=3), scheme(KEY, 5 + at % 20, nonce=3))
    ]
    assert min(strangers) > 1e-4
    assert stats.kstest(strangers, "uniform").pvalue > 0.001


def test_even_weakly_marked_text_is_worth_the_weakest():
    law = [0.92, *[0.08 / 99] * 99]  # 0.65 nats
    assert -sum(p * np.log(p) for p in law) > 0.25
    assert worth(law) > scheme().min_marked_mean
    assert worth([0.93, 0.07]) == pytest.approx(scheme().min_marked_mean, abs=0.01)  # a quarter of a nat
    assert -sum(p * np.log(p) for p in (0.93, 0.07)) == pytest.approx(0.25, abs=0.01)


# ------------------------------------------------------------------- unmarked text
def test_unmarked_texts_look_like_chance():
    """Under random keys the p-values of any text are even, also of one that says the same again and again."""
    rng, found = np.random.default_rng(4), []
    texts = {
        "even": lambda: rng.integers(0, 49152, 150),
        "usual": lambda: np.minimum(rng.zipf(1.2, 150), 49151),
        "loop": lambda: np.tile(rng.integers(0, 99, 30), 5),
        "counting": lambda: np.arange(150) + rng.integers(1000),
        "few words": lambda: rng.integers(0, 4, 150),
    }
    for make in texts.values():
        mine = [
            p_value(scheme(int(rng.integers(2**62)), int(rng.integers(1, 6)), int(rng.integers(16))), make())
            for _ in range(600)
        ]
        assert stats.kstest(mine, "uniform").pvalue > 0.001
        found += mine
    assert stats.kstest(found, "uniform").pvalue > 0.001
    for level in (0.01, 0.001):
        assert stats.binomtest(int((np.array(found) <= level).sum()), len(found), level).pvalue > 0.003
