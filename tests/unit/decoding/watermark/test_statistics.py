"""The laws of unmarked text, against brute force, exact convolution and simulation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from descant.decoding.watermark import statistics
from descant.decoding.watermark.statistics import (
    adjust_p_values,
    binomial_tail,
    gamma_interval,
    gamma_tail,
    mean_interval,
    proportion_interval,
    required_tokens,
    weighted_tail,
)
from descant.errors import InputError
from tests.unit.decoding.watermark.fakes import Counting


# ------------------------------------------------------------------------------------ tails
@pytest.mark.parametrize("p", [Fraction(1, 4), Fraction(1, 2), Fraction(9, 10)])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_binomial_tail_is_the_sum_of_fractions(count: int, p: Fraction) -> None:
    mass = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    for hits in range(-1, count + 2):
        exact = float(sum(mass[max(0, hits) :]))
        assert binomial_tail(count, hits, float(p)) == pytest.approx(exact, rel=1e-12)


def test_binomial_tail_far_out_is_exact() -> None:
    # 0.25^500 and its neighbours: 1e-301, where 1 - cdf would be 0.
    p = Fraction(1, 4)
    exact = sum(math.comb(500, k) * p**k * (1 - p) ** (500 - k) for k in range(498, 501))
    assert exact < Fraction(1, 10**290)
    assert binomial_tail(500, 498, 0.25) == pytest.approx(float(exact), rel=1e-10)


@pytest.mark.parametrize("count", [1, 2, 10, 200, 5000])
def test_gamma_tail(count: int) -> None:
    for share in (0.01, 0.5, 0.9, 0.999, 1.0, 1.001, 1.1, 1.5, 2.0):
        exact = stats.gamma.sf(share * count, count)
        assert gamma_tail(count, share * count) == pytest.approx(exact, rel=1e-9, abs=1e-300)
    assert gamma_tail(count, 0.0) == 1.0
    assert gamma_tail(count, math.inf) == 0.0


def _law(count: int, weights: np.ndarray, p: float) -> np.ndarray:
    """The law of a sum with whole weights, one chance after the other."""
    law = np.ones(1)
    for weight in weights.tolist() * count:
        grown = np.zeros(len(law) + weight)
        grown[: len(law)] += law * (1.0 - p)
        grown[weight:] += law * p
        law = grown
    return law


def _tails(law: np.ndarray) -> np.ndarray:
    return np.cumsum(law[::-1])[::-1]


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [10.0, 5.5, 1.0], [0.5, 0.3, 0.3, 0.1]])
def test_weighted_tail_of_few_tokens_is_brute_force(weights: list[float]) -> None:
    p, count = 0.4, 3
    sums: dict[float, float] = {}
    for ones in itertools.product((0, 1), repeat=count * len(weights)):
        total = round(sum(w * one for w, one in zip(weights * count, ones, strict=True)), 9)
        sums[total] = sums.get(total, 0.0) + math.prod(p if one else 1.0 - p for one in ones)
    for total in sums:
        exact = sum(mass for other, mass in sums.items() if other >= total)
        # As a sum of floats comes out: a hair beside the atom, on either side.
        for beside in (-1e-12, 0.0, 1e-12):
            assert weighted_tail(count, np.array(weights), p, total + beside) == pytest.approx(
                exact, rel=1e-9
            )


@pytest.mark.parametrize(("depth", "count"), [(2, 30), (5, 20), (10, 100), (30, 2), (30, 8)])
def test_weighted_tail_is_exact_on_a_small_lattice(depth: int, count: int) -> None:
    weights = np.linspace(10.0, 1.0, depth)
    step = statistics._lattice_step(weights)
    assert step is not None
    whole = np.rint(weights / step).astype(np.int64)
    tails = _tails(_law(count, whole, 0.49))
    scale = weights.sum()
    for at in np.unique(np.linspace(1, len(tails) - 1, 40).astype(int)):
        if tails[at] > 1e-280:
            got = weighted_tail(count, weights / scale, 0.49, float(at) * step / scale)
            assert got == pytest.approx(tails[at], rel=1e-9)


@pytest.mark.parametrize(("depth", "count"), [(30, 16), (30, 30), (20, 40), (10, 1300), (40, 24)])
def test_the_saddlepoint_is_within_a_thousandth(depth: int, count: int) -> None:
    weights = np.linspace(10.0, 1.0, depth)
    step = statistics._lattice_step(weights)
    assert step is not None
    whole = np.rint(weights / step).astype(np.int64)
    most = count * int(whole.sum())
    assert most > statistics._MAX_LATTICE_SIZE  # else the saddlepoint is not what is asked
    mean, sd = 0.49 * most, math.sqrt(count * 0.49 * 0.51 * float((whole**2).sum()))
    for z in (-3.0, -1.0, -1e-4, 0.0, 1e-4, 0.5, 2.0, 4.0, 8.0, 11.0):
        at = round(mean + z * sd)
        exact = statistics._convolution_tail(count, whole, 0.49, at)
        got = weighted_tail(count, weights, 0.49, at * step)
        assert got == pytest.approx(exact, rel=1e-3)


def test_weights_without_a_lattice() -> None:
    rng = np.random.default_rng(5)
    weights = np.sqrt(np.arange(2.0, 22.0))  # no common measure
    sums = (rng.random((100_000, 10, 20)) < 0.5).sum(1) @ weights
    for share in (0.5, 0.9, 0.99):
        total = float(np.quantile(sums, share))
        seen = float((sums >= total).mean())
        assert weighted_tail(10, weights, 0.5, total) == pytest.approx(
            seen, abs=4 * math.sqrt(seen / 100_000)
        )


def test_the_ends_of_a_weighted_sum() -> None:
    weights = np.array([0.6, 0.3, 0.1])
    assert weighted_tail(4, weights, 0.5, 0.0) == 1.0
    assert weighted_tail(4, weights, 0.5, 4.0) == pytest.approx(0.5**12)
    assert weighted_tail(4, weights, 0.5, 4.001) == 0.0
    assert weighted_tail(2000, np.sqrt(np.arange(1.0, 31.0)), 0.5, 0.0) == 1.0
    # A table that happens to be all ones or all zeros.
    assert weighted_tail(4, weights, 1.0, 4.0) == 1.0
    assert weighted_tail(4, weights, 0.0, 0.1) == 0.0


# --------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize(("count", "hits"), [(10, 0), (10, 3), (10, 10), (1, 1), (200, 80), (5000, 1300)])
def test_proportion_interval_is_clopper_and_pearsons(count: int, hits: int) -> None:
    exact = stats.binomtest(hits, count).proportion_ci(0.95, "exact")
    assert proportion_interval(count, hits) == pytest.approx((exact.low, exact.high), rel=1e-9)


def test_intervals_of_nothing_exclude_nothing() -> None:
    assert proportion_interval(0, 0) == (0.0, 1.0)
    assert gamma_interval(0, 0.0) == (0.0, math.inf)
    assert mean_interval(np.zeros(0)) == mean_interval(np.ones(1)) == (-math.inf, math.inf)


@pytest.mark.parametrize("count", [1, 4, 60, 1000])
def test_gamma_interval_is_exact(count: int) -> None:
    total = 1.3 * count
    low, high = 2 * total / stats.chi2.ppf([0.975, 0.025], 2 * count)
    assert gamma_interval(count, total) == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 30, 150, 300, 1000])
def test_mean_interval_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(0.5, 0.1, count)
    exact = stats.t.interval(0.95, count - 1, values.mean(), values.std(ddof=1) / math.sqrt(count))
    low, high = mean_interval(values)
    assert (low, high) == pytest.approx(exact, rel=1e-6)
    assert high - low == pytest.approx(exact[1] - exact[0], rel=1e-6)
    wide = mean_interval(values, min_std=10.0)
    assert wide[1] - wide[0] > 5 * (exact[1] - exact[0])


# ------------------------------------------------------------------------------- many tests
def test_holm_and_bonferroni() -> None:
    given = [0.01, 0.2, 0.03, 0.005]
    assert adjust_p_values(given) == pytest.approx([0.03, 0.2, 0.06, 0.02])
    assert adjust_p_values(given, "bonferroni") == pytest.approx([0.04, 0.8, 0.12, 0.02])
    assert adjust_p_values([0.9, 0.8]) == [1.0, 1.0]
    assert adjust_p_values([]) == []
    with pytest.raises(InputError, match="must be one of holm, bonferroni, got 'none'"):
        adjust_p_values(given, "none")


# --------------------------------------------------------------------------- level and power


@pytest.mark.parametrize(("score", "alpha"), [(0.5, 0.01), (0.4, 0.001), (0.8, 0.01)])
def test_as_many_tokens_as_needed_are_enough(score: float, alpha: float) -> None:
    scheme, rng = Counting(), np.random.default_rng(4)
    count = required_tokens(scheme, score, alpha)
    assert count is not None
    found = [scheme.p_value(count, float(hits)) <= alpha for hits in rng.binomial(count, score, 2000)]
    assert 0.85 < np.mean(found) <= 1.0
    fewer = [
        scheme.p_value(count // 2, float(hits)) <= alpha for hits in rng.binomial(count // 2, score, 2000)
    ]
    assert np.mean(fewer) < 0.8


def test_no_number_of_tokens_tells_what_is_no_mark() -> None:
    assert required_tokens(Counting(), 0.25) is None
    with pytest.raises(InputError, match="must be between 0 and 1"):
        required_tokens(Counting(), 0.5, alpha=0.0)
