"""Verdicts: p-values, corrections for several tests, keys, and texts without a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark import detection
from descant.decoding.watermark.detection import (
    MARKED,
    NOT_MARKED,
    TOO_SHORT,
    Detector,
    build_schemes,
    resolve_vocab_size,
)
from descant.decoding.watermark.keys import fingerprint
from descant.decoding.watermark.statistics import binomial_tail
from descant.errors import InputError
from tests.unit.decoding.watermark.fakes import Counting

V = 5000
KEY = WatermarkingConfig(hashing_key=11)
OTHER = WatermarkingConfig(hashing_key=12)
THIRD = WatermarkingConfig(hashing_key=13)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectors ask the tests' own watermark."""

    def make_schemes(settings: BaseWatermarkingConfig, vocabulary: int) -> list[Counting]:
        assert isinstance(settings, WatermarkingConfig)
        return [Counting(settings.hashing_key)]

    monkeypatch.setattr(detection, "build_schemes", make_schemes)


def _unmarked(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


def _marked(seed: int, count: int, strength: float = 0.7) -> list[int]:
    return Counting(KEY.hashing_key).write(np.random.default_rng(seed), count, 0, strength)


# ------------------------------------------------------------------------------ one answer
@pytest.mark.usefixtures("counting")
def test_a_marked_text() -> None:
    ids = _marked(0, 200)
    found = Detector(KEY, V).ids(ids)
    evidence = Counting(KEY.hashing_key).score_tokens(np.array(ids))
    hits, count = int(evidence.values.sum()), int(evidence.mask.sum())
    assert found.verdict == MARKED
    assert found.marked
    assert (found.tokens, found.scored) == (200, count)
    assert found.score == hits / count
    assert found.expected == 0.25
    assert found.interval[0] < found.score < found.interval[1]
    assert found.z == pytest.approx((hits - count / 4) / math.sqrt(count * 3 / 16))
    assert found.p_value == found.uncorrected == binomial_tail(count, hits, 0.25)
    assert found.tests == 1
    assert found.key == fingerprint(KEY)
    assert str(KEY.hashing_key) != found.key
    assert found.span is found.characters is found.offsets is found.needed is None
    assert found.ids == tuple(ids)
    assert np.array_equal(found.evidence.values, evidence.values)


@pytest.mark.usefixtures("counting")
def test_an_unmarked_text_long_enough_is_not_marked() -> None:
    found = Detector(KEY, V).ids(_unmarked(1, 400))
    assert found.verdict == NOT_MARKED
    assert found.interval[1] < Counting.min_marked_mean
    assert not found.marked
    assert found.needed is None


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("count", [0, 1, 2, 10])
def test_a_short_text_is_too_short_to_tell(count: int) -> None:
    found = Detector(KEY, V).ids(_unmarked(2, count))
    assert found.verdict == TOO_SHORT
    assert found.tokens == count
    assert found.scored == max(0, count - 1)
    assert len(found.evidence.mask) == count
    assert found.p_value > 0.01
    assert found.needed is not None
    assert 50 < found.needed < 200
    if count < 2:
        assert found.p_value == 1.0
        assert found.z == 0.0
        assert math.isnan(found.score)
        assert found.to_dict()["score"] is None
        assert "none of" in str(found)
    else:
        assert f"about {found.needed} would tell" in str(found)


@pytest.mark.usefixtures("counting")
def test_the_level_is_kept() -> None:
    detector = Detector(KEY, V, alpha=0.05)
    wrong = np.mean([detector.ids(_unmarked(100 + seed, 60)).marked for seed in range(800)])
    assert 0.005 < wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 800)


@pytest.mark.usefixtures("counting")
def test_repeated_text_counts_once() -> None:
    phrase = _marked(4, 3, strength=1.0)
    found = Detector(KEY, V).ids(phrase * 80)
    assert found.tokens == 240
    assert found.scored == 3
    assert found.verdict == TOO_SHORT


# ------------------------------------------------------------------------------ the prompt
@pytest.mark.usefixtures("counting")
def test_a_prompt_is_context_only() -> None:
    prompt = _unmarked(5, 300)
    new = Counting(11).write(np.random.default_rng(5), 40, prompt[-1])
    found = Detector(KEY, V).ids(prompt + new, prompt=300)
    assert found.tokens == 40
    assert found.scored == 40  # the first one too, whose list hangs on the prompt's last
    assert not found.evidence.mask[:300].any()
    assert len(found.ids) == len(found.evidence.mask) == 340
    bare = Detector(KEY, V).ids(new)
    assert bare.scored == 39
    assert np.array_equal(found.evidence.values[301:], bare.evidence.values[1:])
    # What stands in the prompt already is asked there, but answered where it counts.
    again = Detector(KEY, V).ids(new + new, prompt=40)
    assert again.scored == 40


def test_marks_that_begin_with_new_tokens_do_not_look_into_the_prompt() -> None:
    settings = GumbelWatermarkingConfig(key=5, nonce=0, context_width=3)
    ids = _unmarked(6, 60)
    found = Detector(settings, V).ids(ids, prompt=20)
    assert np.flatnonzero(found.evidence.mask).tolist() == list(range(23, 60))
    bare = Detector(settings, V).ids(ids[20:])
    assert np.array_equal(found.evidence.values[20:], bare.evidence.values)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("prompt", [-1, 11, True, "text", 1.0])
def test_a_prompt_that_cannot_be(prompt: Any) -> None:
    with pytest.raises(InputError, match="`prompt` must be a number of tokens between 0 and 10"):
        Detector(KEY, V).ids(_unmarked(7, 10), prompt=prompt)


# ------------------------------------------------------------------------------ many keys
@pytest.mark.usefixtures("counting")
def test_the_key_that_fits_is_named_and_paid_for() -> None:
    ids = _marked(8, 60, strength=0.5)
    alone = Detector(KEY, V).ids(ids)
    among = Detector({"his": OTHER, "hers": KEY, "theirs": THIRD}, V)
    found = among.ids(ids)
    assert found.key == "hers"
    assert found.tests == 3
    assert found.uncorrected == alone.p_value
    assert found.p_value == pytest.approx(3 * alone.p_value)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("correction", ["holm", "bonferroni"])
def test_each_key_has_its_answer(correction: str) -> None:
    ids = _marked(9, 80)
    keys = {"his": OTHER, "hers": KEY, "theirs": THIRD}
    answers = Detector(keys, V, correction=correction).each(ids)
    assert [one.key for one in answers] == list(keys)
    assert [one.marked for one in answers] == [False, True, False]
    order = sorted(answers, key=lambda one: one.uncorrected)
    holm = correction == "holm"
    assert [one.tests for one in order] == ([3, 2, 1] if holm else [3, 3, 3])
    worst = 0.0
    for one in order:
        worst = max(worst, min(1.0, one.uncorrected * one.tests))
        assert one.p_value == pytest.approx(worst if holm else min(1.0, one.uncorrected * one.tests))


def test_nonces_are_tests_as_well() -> None:
    settings = GumbelWatermarkingConfig(key=5, nonces=16)
    detector = Detector({"race": settings, "list": KEY}, V)
    race, green = detector.each(_unmarked(10, 100))
    assert race.tests in (32, 16)
    assert green.tests in (2, 1)
    assert {race.tests == 32, green.tests == 2} in ({True, False}, {False, True})
    assert race.nonce in range(16)
    assert green.nonce is None
    p = [scheme.p_value(race.scored, float(scheme.score_tokens(np.array(race.ids)).values.sum()))
         for scheme in build_schemes(settings, V)]  # fmt: skip
    assert race.uncorrected == pytest.approx(min(p))
    assert race.nonce == int(np.argmin(p))


def test_a_nonce_that_was_sought_is_paid_for() -> None:
    detector = Detector(GumbelWatermarkingConfig(key=5, nonces=16), V, alpha=0.1)
    answers = [detector.ids(_unmarked(4000 + seed, 40)) for seed in range(150)]
    for found in answers:
        assert found.tests == 16
        assert found.p_value == pytest.approx(min(1.0, 16 * found.uncorrected))
    assert any(found.p_value < 1.0 for found in answers)
    assert np.mean([found.marked for found in answers]) <= 0.1 + 3 * math.sqrt(0.09 / 150)
    assert np.mean([found.uncorrected <= 0.1 for found in answers]) > 0.5  # as the best of 16 is


def test_the_same_key_twice_is_one_test() -> None:
    assert Detector([KEY, KEY], V).ids(_unmarked(11, 50)).tests == 1
    wider = WatermarkingConfig(hashing_key=11, seeding_scheme="selfhash", context_width=4)
    assert list(Detector([KEY, wider], V).keys.values()) == [KEY, wider]


# ------------------------------------------------------------------------------ windows
@pytest.mark.usefixtures("counting")
def test_a_passage_inside() -> None:
    rng = np.random.default_rng(12)
    before = _unmarked(12, 310)
    ids = before + Counting(11).write(rng, 80, before[-1], 0.9) + _unmarked(13, 250)
    detector = Detector([KEY, OTHER], V)
    whole, found = detector.ids(ids), detector.ids(ids, windows=True)
    assert whole.span is None
    assert found.verdict == MARKED
    assert found.span is not None
    assert abs(found.span[0] - 310) < 10
    assert abs(found.span[1] - 390) < 10
    assert found.p_value < whole.p_value
    assert found.p_value == pytest.approx(found.uncorrected * found.tests)
    assert 16 <= found.scored <= 128
    assert found.score > 0.6
    assert found.characters is None


@pytest.mark.usefixtures("counting")
def test_without_a_passage_the_answer_is_about_the_whole_text() -> None:
    found = Detector(KEY, V).ids(_unmarked(15, 500), windows=True)
    assert found.verdict == NOT_MARKED
    assert found.span is None
    assert found.scored == 499
    assert Detector(KEY, V).ids([], windows=True).verdict == TOO_SHORT


# ------------------------------------------------------------------------------ to others
@pytest.mark.usefixtures("counting")
def test_to_dict_is_json() -> None:
    found = Detector(KEY, V).ids(_marked(16, 60), windows=True)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["verdict"] == MARKED
    assert tuple(document["span"]) == found.span
    assert "evidence" not in document
    assert "ids" not in document
    full = json.loads(json.dumps(found.to_dict(tokens=True), allow_nan=False))
    assert full["ids"] == list(found.ids)
    assert full["evidence"][0] is None
    assert full["evidence"][1:] == found.evidence.values[1:].tolist()
    empty = Detector(KEY, V).ids([])
    assert json.loads(json.dumps(empty.to_dict(tokens=True), allow_nan=False))["interval"] == [0.0, 1.0]


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_ids_in_any_form(form: Callable[[list[int]], Any]) -> None:
    ids = _marked(17, 50)
    assert Detector(KEY, V).ids(form(ids)).p_value == Detector(KEY, V).ids(ids).p_value


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("ids", [[[1, 2]], torch.ones(1, 5, dtype=torch.long), [1.5], [True], 7, None])
def test_what_is_no_row_of_ids(ids: Any) -> None:
    with pytest.raises(InputError, match="`ids` must be a one-dimensional sequence of token ids"):
        Detector(KEY, V).ids(ids)


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("strange", [-1, V])
def test_ids_of_another_vocabulary(strange: int) -> None:
    with pytest.raises(
        InputError, match=f"must be between 0 and {V - 1}, got {strange}: check that the tokenizer"
    ):
        Detector(KEY, V).ids([1, strange])


@pytest.mark.parametrize("keys", [{}, [], None, "abc", {"a": 1}, [1]])
def test_keys_that_are_none(keys: Any) -> None:
    with pytest.raises(InputError, match="`keys` must be the settings of one or more watermarks"):
        Detector(keys, V)


def test_options_that_cannot_be() -> None:
    with pytest.raises(InputError, match="`alpha` must be between 0 and 1, got 1"):
        Detector(KEY, V, alpha=1)
    with pytest.raises(InputError, match="`correction` must be one of holm, bonferroni"):
        Detector(KEY, V, correction="none")
    with pytest.raises(InputError, match="`tokenizer` is required for text"):
        Detector(KEY, V).text("a text")


def test_a_vocabulary_is_a_number_or_a_models() -> None:
    config = SimpleNamespace(vocab_size=99)
    outer = SimpleNamespace(get_text_config=lambda: config)
    assert [resolve_vocab_size(one) for one in (99, config, outer, SimpleNamespace(config=outer))] == [99] * 4
    for wrong in (0, True, "many", SimpleNamespace(), SimpleNamespace(vocab_size=None)):
        with pytest.raises(InputError, match="`vocabulary` must be"):
            resolve_vocab_size(wrong)


# ------------------------------------------------------------------------- the real schemes
SETTINGS = [
    WatermarkingConfig(hashing_key=7),
    WatermarkingConfig(hashing_key=7, seeding_scheme="selfhash", context_width=3),
    SynthIDTextWatermarkingConfig(ngram_len=5, keys=tuple(range(3, 33))),
    SynthIDTextWatermarkingConfig(ngram_len=3, keys=(5, 9)),
    GumbelWatermarkingConfig(key=9, nonces=4),
    GumbelWatermarkingConfig(key=9, nonce=3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: f"{one.scheme}-{len(str(one))}")
def test_each_scheme_answers(settings: BaseWatermarkingConfig) -> None:
    detector = Detector(settings, V)
    for count in (0, 1, 4, 5, 6, 150):
        found = detector.ids(_unmarked(30 + count, count), windows=True)
        assert found.scheme == settings.scheme
        assert not found.marked
        assert found.scored <= found.tokens == count
        json.dumps(found.to_dict(tokens=True), allow_nan=False)
        if count < 5:
            assert found.verdict == TOO_SHORT
        if count == 150:
            assert found.scored > 130
            assert abs(found.z) < 4
            assert found.interval[0] < found.score < found.interval[1]
    scheme = build_schemes(settings, V)[0]
    assert scheme.min_marked_mean > scheme.null_mean
    assert scheme.p_value(0, 0.0) == 1.0
    assert scheme.p_value(40, 40 * scheme.null_mean) == pytest.approx(0.5, abs=0.12)


def test_keys_whose_p_values_are_all_one_are_ordered_by_what_they_were_before_the_limit():
    def result(p_value, tests):
        window = SimpleNamespace(corrected_p_value=p_value)
        test = SimpleNamespace(best_window=window)
        return SimpleNamespace(p_value=1.0, best_test=test, correction_factor=tests)

    better, worse = result(0.3, 4), result(0.9, 2)  # 1.2 and 1.8
    detector = SimpleNamespace(_make_detection=lambda one: one)
    assert Detector._best_detection(detector, [worse, better]) is better
