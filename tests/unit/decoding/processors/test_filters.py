"""Filters: their shorter ways give the same bits, and wrong arguments are refused."""

from __future__ import annotations

import math

import pytest
import torch

from descant.decoding.processors import filters
from descant.decoding.processors.filters import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

NEVER = -math.inf


def thinned(seed: int, size: int, left: tuple[int, ...], tied: bool) -> torch.Tensor:
    """Lines with so many possible tokens each."""
    chance = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(left), size, generator=chance) * 4
    scores = scores.round() if tied else scores
    for line, count in enumerate(left):
        gone = torch.randperm(size, generator=chance)[count:]
        scores[line, gone] = NEVER
    return scores


def whole(scores: torch.Tensor, tail: float, least: int) -> torch.Tensor:
    """Top-p by a stable sort of whole lines."""
    ascending, order = scores.sort(stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= tail
    drop[:, -least:] = False
    return scores.masked_fill(drop.scatter(1, order, drop), NEVER)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [8_192, 8_261, 32_000, 50_257])
def test_top_p_of_few_tokens_gives_the_bits_of_top_p_of_all(size, tied):
    for seed in range(12):
        scores = thinned(seed, size, (0, 1, 3, 9, 17, 20 + seed), tied)
        line = torch.zeros(len(scores), 1, dtype=torch.long)
        processor = TopPLogitsWarper(0.1 + 0.07 * seed, min_tokens_to_keep=1 + seed % 4)
        assert filters.above_threshold(scores, NEVER) is not None
        short = processor(line, scores)
        assert torch.equal(short, whole(scores, processor.tail_mass, 1 + seed % 4)), seed
        many = torch.cat(
            (scores, torch.randn(1, size))
        )  # another line for which the fast path does not apply
        assert filters.above_threshold(many, NEVER) is None
        beside = processor(torch.zeros(len(many), 1, dtype=torch.long), many)
        assert torch.equal(short, beside[:-1]), seed


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_top_p_of_many_tokens_is_that_of_a_stable_sort(kind):
    """On the host float32 takes a way of its own; float64 takes the one that other devices take."""
    split = 0
    for seed in range(60):
        chance = torch.Generator().manual_seed(seed)
        scores = torch.randn(5, 300, generator=chance, dtype=kind) * 2
        if seed % 3:
            scores = (scores * (seed % 3)).round() / 2
        scores[1, :290] = NEVER
        scores[2] = NEVER
        scores[3] = torch.nan
        scores[4, 7] = torch.nan
        least = 1 + seed % 13
        processor = TopPLogitsWarper(0.02 + 0.016 * seed, min_tokens_to_keep=least)
        answer = processor(torch.zeros(5, 1, dtype=torch.long), scores)
        expected = whole(scores, processor.tail_mass, least)
        assert torch.equal(answer[:3], expected[:3]), seed
        assert torch.equal(answer[3:].nan_to_num(7.0), scores[3:].nan_to_num(7.0)), "spoilt lines stay"
        kept = answer[0].isfinite()
        split += bool((scores[0, kept].min() == scores[0, ~kept].max()) if not kept.all() else False)
    assert split > 20, "few cuts between equal scores"


def test_invalid_lines_leave_the_others_unchanged():
    scores = thinned(1, 20_001, (40, 40, 40, 40), tied=False)
    line = torch.zeros(4, 1, dtype=torch.long)
    for processor in (TopPLogitsWarper(0.6), TopKLogitsWarper(9)):
        alone = processor(line, scores)
        for bad in (torch.nan, NEVER):
            spoilt = scores.clone()
            spoilt[2] = bad
            answer = processor(line, spoilt)
            assert torch.equal(answer[[0, 1, 3]], alone[[0, 1, 3]])
            assert torch.equal(answer[2].nan_to_num(7.0), spoilt[2].nan_to_num(7.0)), "it stays as it is"
        partly = scores.clone()
        partly[2, 20_000] = torch.nan
        assert processor(line, partly)[2, 20_000].isnan()


@pytest.mark.parametrize("size", [70, 4_097, 20_000])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_the_best_scores_are_those_of_a_sort(size, count):
    for seed in range(10):
        scores = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * 3
        scores = scores.round() if seed % 2 else scores
        scores[1, : size // 2] = NEVER
        expected = scores.sort(descending=True).values[:, :count]
        assert torch.equal(filters.topk_values(scores, count), expected)
        assert torch.equal(TopKLogitsWarper(count)(torch.zeros(4, 1), scores), _top_k(scores, count))


def _top_k(scores, count):
    return torch.where(scores >= scores.sort(descending=True).values[:, count - 1 : count], scores, NEVER)


def test_a_tail_of_just_the_mass_goes():
    answer = TopPLogitsWarper(0.5)(torch.zeros(1, 1), torch.zeros(1, 4))
    assert answer.tolist() == [[NEVER, NEVER, 0.0, 0.0]]


def test_of_equal_scores_the_same_stay_in_every_order_of_sorting():
    level = torch.zeros(1, 100)
    assert TopPLogitsWarper(0.105)(torch.zeros(1, 1), level)[0].isfinite().nonzero()[:, 0].tolist() == [
        *range(89, 100)
    ]
    kept = MinPLogitsWarper(1.0, min_tokens_to_keep=5)(torch.zeros(1, 1), torch.tensor([[9.0] + [0.0] * 40]))
    assert kept[0].isfinite().nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_what_is_as_likely_as_epsilon_stays():
    scores = torch.tensor([[0.0, -math.log(2), -math.log(2)]])
    assert scores.softmax(-1).tolist() == [[0.5, 0.25, 0.25]]
    assert torch.equal(EpsilonLogitsWarper(0.25)(torch.zeros(1, 1), scores), scores)


def test_typical_tokens_all_stay_where_their_rounded_mass_is_below_the_share():
    scores = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    share = 1 - 2**-24  # the largest float32 below 1
    assert bool((scores.softmax(-1).cumsum(-1)[:, -1] < share).any())
    assert torch.equal(TypicalLogitsWarper(share)(torch.zeros(500, 1), scores), scores)
