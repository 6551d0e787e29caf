"""The green list's processor: every line by its own tokens and settings, whatever is beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from descant import GenerationConfig
from descant.config.watermarking_config import WatermarkingConfig
from descant.core.context import PromptInfo
from descant.decoding.watermark.green_list import SELFHASH_CANDIDATES, GreenList, WatermarkLogitsProcessor
from descant.decoding.watermark.keys import PublicKeyWarning
from descant.errors import ConfigError, InputError
from tests.unit.decoding.processors.reference import context, drafted

SIZE = 61


def settings_of(rng: random.Random) -> WatermarkingConfig:
    return WatermarkingConfig(
        greenlist_ratio=rng.choice([0.1, 0.25, 0.5]),
        bias=rng.choice([-1.5, 0.7, 2.3]),
        hashing_key=rng.choice([11, 2**40 + 1, 2**63 - 1]),
        seeding_scheme=rng.choice(["lefthash", "selfhash"]),
        context_width=rng.choice([1, 2, 4]),
    )


def marked(row: list[int], scores: torch.Tensor, settings: WatermarkingConfig) -> torch.Tensor:
    """One line's scores alone, of the tokens that are asked about."""
    if len(row) < settings.context_width:
        return scores
    some, answer = GreenList(settings, len(scores)), scores.clone()
    if settings.seeding_scheme == "lefthash":
        tokens = list(range(len(scores)))
    else:
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        tokens = [token for token in order[:SELFHASH_CANDIDATES] if scores[token] > -torch.inf]
    before = np.array([row[len(row) - some.context_size :]]).reshape(1, -1)
    seeds = some.seeds(before, np.array([tokens]))[0]
    for token, green in zip(tokens, some.is_green(seeds, np.array(tokens)), strict=True):
        if green:
            answer[token] = scores[token] + settings.bias
    return answer


def chance_scores(rng: random.Random, lines: int, size: int = SIZE) -> torch.Tensor:
    scores = torch.tensor([[rng.gauss(0, 3) for _ in range(size)] for _ in range(lines)])
    return scores.masked_fill(torch.rand(lines, size) < rng.choice([0.0, 0.5]), -torch.inf)


@pytest.mark.parametrize("one_setting", [True, False])
def test_ragged_lines_with_settings_of_their_own(one_setting):
    rng, changed = random.Random(1), 0
    for _ in range(40):
        rows = [[rng.randrange(SIZE) for _ in range(rng.randint(0, 6))] for _ in range(5)]
        rows[0] = rows[0] or [1]
        same = settings_of(rng)
        params = [{"watermark": same if one_setting else settings_of(rng)} for _ in rows]
        lines = context(rng, rows, [0] * len(rows), params)
        scores = chance_scores(rng, len(rows))
        kept = scores.clone()
        answer = WatermarkLogitsProcessor.make_unbound().process(lines, scores)
        assert torch.equal(scores, kept)
        for line, row in enumerate(rows):
            assert torch.equal(answer[line], marked(row, scores[line], params[line]["watermark"]))
        changed += not torch.equal(answer, scores)
    assert changed > 32


def test_lines_of_drafts():
    rng = random.Random(2)
    for _ in range(12):
        rows = [[rng.randrange(SIZE) for _ in range(rng.randint(1, 6))] for _ in range(3)]
        drafts = [[rng.randrange(SIZE) for _ in range(3)] for _ in rows]
        params = [{"watermark": settings_of(rng)} for _ in rows]
        scores = chance_scores(rng, 12)
        answer = WatermarkLogitsProcessor.make_unbound().process(
            drafted(rng, rows, [1] * 3, params, drafts), scores
        )
        for line in range(12):
            row = rows[line // 4] + drafts[line // 4][: line % 4]
            assert torch.equal(answer[line], marked(row, scores[line], params[line // 4]["watermark"]))


def test_a_line_shorter_than_the_context_is_left_as_it_is():
    for scheme in ("lefthash", "selfhash"):
        by_hand = WatermarkLogitsProcessor(SIZE, "cpu", hashing_key=5, seeding_scheme=scheme, context_width=3)
        scores = torch.zeros(1, SIZE)
        for length in range(6):
            answer = by_hand(torch.arange(length)[None], scores)
            assert torch.equal(answer, scores) == (length < 3)


def test_scores_beyond_the_vocabulary_are_never_green():
    for scheme in ("lefthash", "selfhash"):
        by_hand = WatermarkLogitsProcessor(SIZE, "cpu", 0.5, hashing_key=5, seeding_scheme=scheme)
        ids, scores = torch.tensor([[3], [4], [5]]), torch.randn(3, 2 * SIZE)
        raised = (by_hand(ids, scores) != scores).nonzero()[:, 1]
        assert len(raised) > 10
        assert raised.max() < SIZE
        if scheme == "lefthash":
            assert torch.equal(by_hand(ids, scores[:, :SIZE]), by_hand(ids, scores)[:, :SIZE])


def test_scores_narrower_than_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="vocab_size"):
        WatermarkLogitsProcessor(SIZE, "cpu", hashing_key=5)(
            torch.ones(1, 2, dtype=torch.long), torch.zeros(1, 60)
        )


def test_selfhash_asks_about_the_best_only_and_not_about_what_is_ruled_out(monkeypatch):
    asked = []
    member = GreenList.is_green
    monkeypatch.setattr(
        GreenList, "is_green", lambda self, *two: asked.append(two[1].tolist()) or member(self, *two)
    )
    by_hand = WatermarkLogitsProcessor(200, "cpu", 0.5, hashing_key=5, seeding_scheme="selfhash")
    scores = torch.arange(200.0)[None]
    answer = by_hand(torch.ones(1, 1, dtype=torch.long), scores)
    assert torch.equal(answer[:, :160], scores[:, :160])
    assert 8 < (answer != scores).sum() < 32
    by_hand(torch.ones(1, 1, dtype=torch.long), scores.masked_fill(scores < 197, -torch.inf))
    assert sorted(asked[0]) == list(range(160, 200))
    assert sorted(asked[1]) == [197, 198, 199]


def test_fewer_tokens_than_candidates():
    by_hand = WatermarkLogitsProcessor(8, "cpu", 0.5, hashing_key=5, seeding_scheme="selfhash")
    scores = torch.randn(4, 8)
    answer = by_hand(torch.arange(4)[:, None], scores)
    expected = [marked([line], scores[line], by_hand.watermark) for line in range(4)]
    assert torch.equal(answer, torch.stack(expected))
    assert not torch.equal(answer, scores)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_score_is_raised_by_one_addition(dtype):
    by_hand = WatermarkLogitsProcessor(SIZE, "cpu", 0.5, bias=2.3, hashing_key=5)
    scores = torch.randn(4, SIZE).to(dtype)
    scores[0, 5], scores[1, 6], scores[2, 7] = torch.nan, torch.inf, -torch.inf
    answer = by_hand(torch.arange(4)[:, None], scores)
    green = GreenList(by_hand.watermark, SIZE).green_mask(range(4))
    assert answer.dtype == dtype
    assert torch.equal(answer.nan_to_num(7.0), torch.where(green, scores + 2.3, scores).nan_to_num(7.0))


def test_a_row_is_given_its_settings():
    given = {"bias": 1.5, "hashing_key": 99}
    for config in (given, WatermarkingConfig(**given)):
        columns = WatermarkLogitsProcessor.params_from_config(
            GenerationConfig(watermarking_config=config), PromptInfo(3)
        )
        assert columns == {"watermark": WatermarkingConfig(bias=1.5, hashing_key=99)}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("greenlist_ratio", 1.0, ConfigError),
        ("greenlist_ratio", 0.001, ConfigError),
        ("bias", "much", ConfigError),
        ("hashing_key", 0, ConfigError),
        ("seeding_scheme", "righthash", ConfigError),
        ("context_width", 0, ConfigError),
        ("vocab_size", 1, InputError),
        ("vocab_size", 7.0, InputError),
        ("device", "toaster", RuntimeError),
    ],
)
def test_wrong_arguments(name, value, error):
    with pytest.raises(error, match=name if error is not RuntimeError else value):
        WatermarkLogitsProcessor(**{"vocab_size": SIZE, "device": "cpu", "hashing_key": 5, name: value})


def test_the_documented_key_is_known_to_everybody():
    with pytest.warns(PublicKeyWarning):
        by_hand = WatermarkLogitsProcessor(SIZE, "cpu")
    assert by_hand.watermark == WatermarkingConfig()
