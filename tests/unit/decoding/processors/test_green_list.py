"""The green list's processor: every line by its own tokens and settings, whatever is beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from descant.config.watermarking_config import WatermarkingConfig
from descant.decoding.watermark.green_list import SELFHASH_CANDIDATES, GreenList, WatermarkLogitsProcessor
from descant.decoding.watermark.keys import PublicKeyWarning
from tests.unit.decoding.processors.reference import context

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


def test_the_documented_key_is_known_to_everybody():
    with pytest.warns(PublicKeyWarning):
        by_hand = WatermarkLogitsProcessor(SIZE, "cpu")
    assert by_hand.watermark == WatermarkingConfig()
