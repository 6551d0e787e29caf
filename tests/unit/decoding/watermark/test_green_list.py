"""Detection of the green list: scored tokens, unmarked text, and the documented detector."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from descant.config.watermarking_config import WatermarkingConfig
from descant.decoding.watermark.green_list import (
    GreenList,
    GreenListScheme,
    WatermarkDetector,
    WatermarkLogitsProcessor,
)
from descant.decoding.watermark.keys import PublicKeyWarning
from descant.errors import InputError

SIZE = 97
SCHEMES = ("lefthash", "selfhash")
MODEL = SimpleNamespace(vocab_size=SIZE, bos_token_id=1, is_encoder_decoder=False)


def settings(scheme: str = "lefthash", **more) -> WatermarkingConfig:
    return WatermarkingConfig(**{"hashing_key": 15_487_469, "seeding_scheme": scheme, **more})


def generate_text(mark: WatermarkingConfig | None, length: int, seed: int, spread: float = 1.0) -> list[int]:
    """A text sampled from chance scores, marked or not."""
    chance = torch.Generator().manual_seed(seed)
    processor = WatermarkLogitsProcessor(SIZE, "cpu", **mark.to_dict()) if mark else None
    row = [2, 3, 4, 5]
    while len(row) < length + 4:
        scores = torch.randn(1, SIZE, generator=chance) * spread
        scores = processor(torch.tensor([row]), scores) if processor else scores
        row.append(int(torch.multinomial(scores.softmax(-1)[0], 1, generator=chance)))
    return row[4:]


# ------------------------------------------------------------------------------------- evidence
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_asked_twice_is_scored_once(scheme):
    rng, repeats = random.Random(1), 0
    for width in (1, 2, 4):
        one = GreenListScheme(settings(scheme, context_width=width), SIZE)
        some = GreenList(one.settings, SIZE)
        assert one.context_size == (1 if scheme == "lefthash" else width - 1)
        ids = np.array([rng.randrange(1, 9) for _ in range(120)])
        scored, value = one.score_tokens(ids)
        seen = set()
        for place, token in enumerate(ids.tolist()):
            if place < one.context_size:
                assert not scored[place]
                continue
            before = ids[None, place - one.context_size : place]
            seed = some.seeds(before, np.array([[token]]))[0, 0]
            new = (seed, token) not in seen
            seen.add((seed, token))
            assert scored[place] == new
            assert value[place] == (new and some.is_green(np.array([seed]), np.array([token]))[0])
            repeats += not new
    assert repeats > 100


def test_lefthash_hangs_on_the_last_token_whatever_the_context():
    ids = np.array([7, 3, 5, 8, 3, 5])  # (3, 5) after 7 and after 8
    for width in (1, 2, 4):
        scored = GreenListScheme(settings(context_width=width), SIZE).score_tokens(ids).mask
        assert scored.tolist() == [False, True, True, True, True, False]


def test_selfhash_of_one_token_asks_about_that_token_alone():
    scored = GreenListScheme(settings("selfhash"), SIZE).score_tokens(np.array([4, 5, 4, 6])).mask
    assert scored.tolist() == [True, True, False, True]


def test_a_list_that_every_key_shares_is_no_evidence():
    """After token 0; and with a key of 33 zero bits after every token."""
    scored = GreenListScheme(settings(), SIZE).score_tokens(np.array([0, 5, 0, 6, 7])).mask
    assert scored.tolist() == [False, False, True, False, True]
    whole = GreenListScheme(settings(hashing_key=2**33), SIZE).score_tokens(np.arange(50)).mask
    assert not whole.any()


def test_what_is_no_token_is_not_scored():
    scored, value = GreenListScheme(settings(), SIZE).score_tokens(np.array([5, SIZE, 5, -1, 6]))
    assert scored.tolist() == [False, False, True, False, True]
    assert not value[~scored].any()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_short_texts(scheme, length):
    one = GreenListScheme(settings(scheme, context_width=3), SIZE)
    scored, value = one.score_tokens(np.arange(4, 4 + length))
    assert scored.shape == value.shape == (length,)
    assert scored.sum() == max(0, length - one.context_size)


def test_a_bias_below_zero_makes_red_count():
    ids = np.array(generate_text(None, 200, 1))
    green, red = (GreenListScheme(settings(bias=bias), SIZE) for bias in (2.0, -2.0))
    mine, theirs = green.score_tokens(ids), red.score_tokens(ids)
    assert (mine.values + theirs.values == mine.mask).all()
    assert red.null_mean == 1 - green.null_mean == 1 - int(SIZE * 0.25) / SIZE
    marked = red.score_tokens(np.array(generate_text(red.settings, 200, 2)))
    assert red.p_value(int(marked.mask.sum()), marked.values.sum()) < 1e-4


# ----------------------------------------------------------------------------------- statistics
def test_the_tail_is_that_of_the_binomial_law():
    one = GreenListScheme(settings(greenlist_ratio=0.5), 64)
    assert (one.null_mean, one.null_std) == (0.5, 0.5)
    for count, hits in ((10, 7), (10, 0), (40, 33)):
        exact = sum(math.comb(count, k) for k in range(hits, count + 1)) / 2**count
        assert one.p_value(count, hits) == pytest.approx(exact)
        assert one.p_value(count, hits + 1e-5) == pytest.approx(exact - math.comb(count, hits) / 2**count)
    assert one.p_value(0, 0.0) == 1.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_unmarked_text_that_repeats_itself_says_nothing(scheme):
    """Over many keys the values have the mean and at most the variance that the p-value assumes."""
    rng = random.Random(3)
    phrase = [rng.randrange(1, SIZE) for _ in range(25)]
    ids = np.array([token for _ in range(8) for token in (*phrase, rng.randrange(1, SIZE))])
    keys = 400 if scheme == "lefthash" else 15
    sums, small = [], 0
    for key in range(1, keys + 1):
        mark = settings(
            scheme, hashing_key=key * 7_368_787 + 1, context_width=1 if scheme == "lefthash" else 3
        )
        one = GreenListScheme(mark, SIZE)
        scored, value = one.score_tokens(ids)
        count = int(scored.sum())
        sums.append((value.sum() - count * one.null_mean) / (one.null_std * math.sqrt(count)))
        small += one.p_value(count, value.sum()) <= 0.05
    assert abs(np.mean(sums)) < 4 / math.sqrt(keys)
    assert np.var(sums) < 1 + 4 * math.sqrt(2 / keys)
    assert small <= 0.05 * keys + 4 * math.sqrt(0.05 * 0.95 * keys)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_marked_text_is_found_and_only_with_its_key(scheme):
    mark = settings(scheme, context_width=2)
    one, other = (
        GreenListScheme(mark, SIZE),
        GreenListScheme(settings(scheme, context_width=2, hashing_key=5), SIZE),
    )
    for seed in range(3):
        ids = np.array(generate_text(mark, 150, seed, spread=2.0))
        scored, value = one.score_tokens(ids)
        assert one.p_value(int(scored.sum()), value.sum()) < 1e-4
        assert value.sum() / scored.sum() > one.min_marked_mean
        scored, value = other.score_tokens(ids)
        assert other.p_value(int(scored.sum()), value.sum()) > 1e-3


def test_the_weakest_mark_lies_between_none_and_a_free_one():
    for ratio, bias in ((0.25, 2.0), (0.5, 1.0), (0.25, 0.5), (0.25, -2.0), (0.25, 1e4)):
        one = GreenListScheme(settings(greenlist_ratio=ratio, bias=bias), 100)
        pull = math.exp(min(abs(bias), 50))
        free = pull * one.null_mean / (1 - one.null_mean + pull * one.null_mean)
        assert one.null_mean < one.min_marked_mean < free
    assert (
        GreenListScheme(settings(bias=0.0), SIZE).min_marked_mean
        == GreenListScheme(settings(bias=0.0), SIZE).null_mean
    )


# ------------------------------------------------------------------------- the documented detector
def test_a_batch_says_what_its_texts_say_alone():
    for scheme in SCHEMES:
        detector = WatermarkDetector(MODEL, "cpu", settings(scheme, context_width=2))
        ids = torch.tensor(
            [generate_text(settings(scheme, context_width=2), 80, 1), generate_text(None, 80, 2)]
        )
        ids[1, 0] = MODEL.bos_token_id
        together = vars(detector(ids, return_dict=True))
        assert together["prediction"].tolist() == [True, False] == detector(ids).tolist()
        for line in range(2):
            alone = vars(detector(ids[line : line + 1], return_dict=True))
            assert {name: value[line] for name, value in together.items()} == {
                name: value[0] for name, value in alone.items()
            }
        assert (together["confidence"] == 1 - together["p_value"]).all()
        assert (
            together["green_fraction"] == together["num_green_tokens"] / together["num_tokens_scored"]
        ).all()


def test_the_threshold_is_the_callers():
    detector = WatermarkDetector(MODEL, "cpu", settings())
    ids = torch.tensor([generate_text(None, 60, 3)])
    z = detector(ids, return_dict=True).z_score[0]
    assert detector(ids, z_threshold=z - 0.01).tolist() == [True]
    assert detector(ids, z_threshold=z).tolist() == [False]


def test_repeats_count_once_if_asked():
    ids = torch.tensor([[5, 6, 7] * 9])
    every = WatermarkDetector(MODEL, "cpu", settings())(ids, return_dict=True)
    once = WatermarkDetector(MODEL, "cpu", settings(), ignore_repeated_ngrams=True)(ids, return_dict=True)
    assert (every.num_tokens_scored[0], once.num_tokens_scored[0]) == (26, 3)


def test_whose_text_begins_with_what():
    ids = torch.tensor([[1, 5, 6, 7, 8], [0, 5, 6, 7, 8]])
    starts = {
        (4, 3): MODEL,  # scored tokens of the two rows
        (3, 4): SimpleNamespace(
            vocab_size=SIZE, bos_token_id=1, is_encoder_decoder=True, decoder_start_token_id=0
        ),
        (4, 4): SimpleNamespace(vocab_size=SIZE),
    }
    for (second, first), model in starts.items():
        found = WatermarkDetector(model, "cpu", settings())(ids, return_dict=True)
        assert found.num_tokens_scored.tolist() == [first, second]


def test_configs_of_transformers():
    ids = torch.tensor([generate_text(settings(), 60, 4)])
    expected = WatermarkDetector(MODEL, "cpu", settings())(ids, return_dict=True).z_score
    model = transformers.LlamaConfig(vocab_size=SIZE)
    mark = transformers.WatermarkingConfig(hashing_key=settings().hashing_key)
    whole = SimpleNamespace(get_text_config=lambda: model, vocab_size=5)
    for config, given in ((model, settings().to_dict()), (model, mark), (whole, settings())):
        assert WatermarkDetector(config, "cpu", given)(ids, return_dict=True).z_score == expected


def test_the_documented_key_is_known_to_everybody():
    with pytest.warns(PublicKeyWarning):
        WatermarkDetector(MODEL, "cpu", {"bias": 2.5})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_config": SimpleNamespace(bos_token_id=1)}, "vocab_size"),
        ({"watermarking_config": {"ngram_len": 5, "keys": [1, 2]}}, "green list"),
        ({"watermarking_config": 7}, "watermarking_config"),
        ({"max_cache_size": -1}, "max_cache_size"),
        ({"device": "toaster"}, "toaster"),
    ],
)
def test_wrong_arguments(change, match):
    given = {"model_config": MODEL, "device": "cpu", "watermarking_config": settings(), **change}
    with pytest.raises((ValueError, RuntimeError), match=match):
        WatermarkDetector(**given)


@pytest.mark.parametrize(
    "ids", [torch.ones(2, 3, dtype=torch.long), torch.arange(9), torch.rand(2, 9), torch.zeros(0, 9).long()]
)
def test_wrong_ids(ids):
    """Too short once the token that begins a text is gone; no batch; no ids; no texts."""
    with pytest.raises(InputError, match="input_ids"):
        WatermarkDetector(MODEL, "cpu", settings(context_width=2))(ids)
