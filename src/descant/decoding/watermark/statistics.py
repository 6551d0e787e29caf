"""Statistics: the exact laws of unmarked text's evidence, intervals, and the correction for many tests.

Everything is reckoned by its logarithm, so that a tail of 1e-300 is as exact as one of 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from descant.decoding.watermark.scores import Array, WatermarkScheme
from descant.errors import InputError

__all__ = [
    "CORRECTIONS",
    "adjust_p_values",
    "binomial_tail",
    "gamma_interval",
    "gamma_tail",
    "mean_interval",
    "proportion_interval",
    "randomized_p_value",
    "required_tokens",
    "weighted_tail",
]

CORRECTIONS: Final = ("holm", "bonferroni")
# Totals are sums of floats: one that lies so little beyond an atom of the law is that atom.
_SLACK: Final = 1e-9
_MAX_LATTICE_SIZE: Final = 2**16  # values of a weighted sum up to which its law is reckoned exactly
_NEAR_ZERO: Final = 1e-3  # |w| below which the saddlepoint's formula is 0/0 and its limit is used
_MIN_SERIES_DF: Final = 200  # degrees of freedom from which Student's quantile is a series


# ------------------------------------------------------------------------------------ tails
def binomial_tail(count: int, hits: int, p: float) -> float:
    """The probability of `hits` or more successes in `count` trials of chance `p`."""
    if hits <= 0:
        return 1.0
    if hits > count or p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    if hits > count * p:
        k = np.arange(hits, count, dtype=np.float64)
        ratio = (count - k) / (k + 1.0) * (p / (1.0 - p))
        return _sum_series(_binomial_log(count, hits, p), ratio)
    # Below the mean the other side is the smaller one, and loses nothing when it is taken from 1.
    k = np.arange(hits - 1, 0, -1, dtype=np.float64)
    ratio = k / (count - k + 1.0) * ((1.0 - p) / p)
    return 1.0 - _sum_series(_binomial_log(count, hits - 1, p), ratio)


def gamma_tail(count: int, total: float) -> float:
    """The probability that `count` draws of the unit exponential law sum to `total` or more."""
    if count <= 0:
        return 1.0 if total <= 0.0 else 0.0
    if total <= 0.0:
        return 1.0
    if math.isinf(total):
        return 0.0
    # As many arrivals of a Poisson process as `count` by the time `total` are one too many.
    if total > count:
        k = np.arange(count - 1, 0, -1, dtype=np.float64)
        return _sum_series(_poisson_log(count - 1, total), k / total)
    rest = np.arange(count + 1, count + 64 + 16 * math.isqrt(count), dtype=np.float64)
    return 1.0 - _sum_series(_poisson_log(count, total), total / rest)


def weighted_tail(count: int, weights: Array, p: float, total: float) -> float:
    """The probability that `count` tokens' sums of `weights` [D], each there by chance `p`, reach `total`.

    Equal weights are a binomial law. Where the weights are whole multiples of one number, as those that fall
    linearly are, and few values are possible, the law is convolved exactly. Otherwise it is Lugannani and
    Rice's saddlepoint formula (1980, Adv. Appl. Prob. 12) with the correction for a lattice: against the
    exact law its relative error is below 0.1 % wherever it is asked for a tail above 1e-30.
    """
    weights = np.asarray(weights, np.float64)
    most = count * float(weights.sum())
    slack = _SLACK * max(1.0, most)
    if total <= slack:
        return 1.0
    if total > most + slack or p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    depth = len(weights)
    if float(np.ptp(weights)) <= _SLACK * float(weights[0]):
        return binomial_tail(count * depth, math.ceil(total / float(weights.mean()) - 1e-6), p)
    step = _lattice_step(weights)
    if step is not None and most / step <= _MAX_LATTICE_SIZE:
        return _convolution_tail(
            count, np.rint(weights / step).astype(np.int64), p, math.ceil(total / step - 1e-6)
        )
    if step is not None:
        total = step * math.ceil(total / step - 1e-6)
    return _saddlepoint_tail(count, weights, p, total, step or 0.0)


def _sum_series(log_first: float, ratio: Array) -> float:
    """The sum of a series by its first term's logarithm and each term's ratio to the one before."""
    series = 1.0 + float(np.cumprod(ratio).sum())
    return min(1.0, math.exp(min(0.0, log_first + math.log(series))))


def _binomial_log(count: int, k: int, p: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return ways + k * math.log(p) + (count - k) * math.log1p(-p)


def _poisson_log(k: int, mean: float) -> float:
    return k * math.log(mean) - mean - math.lgamma(k + 1)


# ------------------------------------------------------------------- weighted sums of chances
def _lattice_step(weights: Array) -> float | None:
    """The number that all weights are whole multiples of, if one not too small is."""
    least = float(weights.min())
    if least <= 0.0:
        return None
    for parts in range(1, 257):
        multiples = weights * (parts / least)
        if float(np.abs(multiples - np.rint(multiples)).max()) < 1e-7:
            return least / parts
    return None


def _convolution_tail(count: int, weights: Array, p: float, hits: int) -> float:
    """The tail of a sum with whole weights [D], exactly: its law tilted to `hits`, by Fourier transform.

    The tilt makes `hits` the mean, so that what is rounded is small against what is summed.
    """
    most = count * int(weights.sum())
    if hits >= most:  # the last atom, where no finite tilt has its mean
        return math.exp(count * len(weights) * math.log(p)) if hits == most else 0.0
    real = weights.astype(np.float64)
    s = _solve_saddlepoint(count, real, p, float(hits))
    if s < 0.0:  # the larger side: less than `hits` are so many more of the complements, and those are few
        return 1.0 - _convolution_tail(count, weights, 1.0 - p, most - hits + 1)
    law = np.ones(1)  # of one token
    for weight in weights:
        chance = _tilted_prob(p, s * float(weight))
        grown = np.zeros(len(law) + int(weight))
        grown[: len(law)] += law * (1.0 - chance)
        grown[int(weight) :] += law * chance
        law = grown
    size = 1 << most.bit_length()
    masses = np.fft.irfft(np.fft.rfft(law, size) ** count, size)[hits : most + 1]
    beyond = np.arange(len(masses), dtype=np.float64)
    tilted = float((np.maximum(masses, 0.0) * np.exp(-s * beyond)).sum())
    return min(1.0, tilted * math.exp(min(0.0, _cumulant(count, real, p, s) - s * hits)))


def _saddlepoint_tail(count: int, weights: Array, p: float, total: float, step: float) -> float:
    """The tail by the saddlepoint, for values that are whole multiples of `step` (0: any)."""
    most = count * float(weights.sum())
    # The formula has no value at the last atom: whatever lies nearer to it than the least weight is it.
    if total > most - float(weights.min()) * (1.0 - _SLACK):
        return math.exp(count * len(weights) * math.log(p))
    s = _solve_saddlepoint(count, weights, p, total)
    chance = np.array([_tilted_prob(p, s * float(weight)) for weight in weights])
    variance = count * float((weights**2 * chance * (1.0 - chance)).sum())
    w = math.copysign(math.sqrt(max(0.0, 2.0 * (s * total - _cumulant(count, weights, p, s)))), s)
    if abs(w) < _NEAR_ZERO:
        third = count * float((weights**3).sum()) * p * (1.0 - p) * (1.0 - 2.0 * p)
        gap = -third / (6.0 * variance * math.sqrt(variance)) + 0.5 * step / math.sqrt(variance)
    else:
        # On a lattice the integral is a sum: Daniels' first continuity correction.
        slope = -math.expm1(-s * step) / step if step > 0.0 else s
        gap = 1.0 / (slope * math.sqrt(variance)) - 1.0 / w
    # Mills' ratio keeps the relative accuracy where the normal tail itself is 0.
    density = math.exp(-0.5 * w * w) / math.sqrt(2.0 * math.pi)
    value = (
        density * (_mills_ratio(w) + gap) if w > 0.0 else 0.5 * math.erfc(w / math.sqrt(2.0)) + density * gap
    )
    return min(1.0, max(0.0, value))


def _mills_ratio(w: float) -> float:
    """The normal tail over the normal density, `w` > 0."""
    if w < 30.0:
        return 0.5 * math.erfc(w / math.sqrt(2.0)) * math.sqrt(2.0 * math.pi) * math.exp(0.5 * w * w)
    square = 1.0 / (w * w)
    return float((1.0 - square * (1.0 - 3.0 * square * (1.0 - 5.0 * square))) / w)


def _tilted_prob(p: float, x: float) -> float:
    """The chance `p` when a success weighs exp(x) times as much."""
    odds = math.log(p) - math.log1p(-p) + x
    return 1.0 / (1.0 + math.exp(-odds)) if odds >= 0.0 else math.exp(odds) / (1.0 + math.exp(odds))


def _cumulant(count: int, weights: Array, p: float, s: float) -> float:
    return count * float(np.logaddexp(math.log1p(-p), math.log(p) + s * weights).sum())


def _solve_saddlepoint(count: int, weights: Array, p: float, total: float) -> float:
    """The tilt under which `total` is the mean, by Newton's method kept between bounds."""
    scale = float(weights.max())
    low, high = -60.0 / float(weights.min()), 60.0 / float(weights.min())
    s, aim = 0.0, total / count
    for _ in range(200):
        exponent = math.log(p) - math.log1p(-p) + s * weights
        chance = 0.5 * (1.0 + np.tanh(0.5 * exponent))
        miss = float((weights * chance).sum()) - aim
        low, high = (s, high) if miss < 0.0 else (low, s)
        slope = float((weights**2 * chance * (1.0 - chance)).sum())
        guess = s - miss / slope if slope > 0.0 else math.inf
        if not low < guess < high:
            guess = 0.5 * (low + high)
        if abs(guess - s) * scale < 1e-13:
            return guess
        s = guess
    return s


# --------------------------------------------------------------------------------- intervals
def proportion_interval(count: int, hits: int, level: float = 0.95) -> tuple[float, float]:
    """An interval that holds the chance of a success at least so often (Clopper and Pearson 1934)."""
    if count <= 0:
        return 0.0, 1.0
    half = (1.0 - level) / 2.0

    def least(many: int) -> float:
        if many <= 0:
            return 0.0
        return _bisect(lambda p: binomial_tail(count, many, p) - half, 0.0, many / count)

    # As few hits or fewer are as many misses or more.
    return least(hits), 1.0 - least(count - hits)


def gamma_interval(count: int, total: float, level: float = 0.95) -> tuple[float, float]:
    """An interval of the mean of exponential values, exact for them, and wide enough for steadier ones."""
    if count <= 0:
        return 0.0, math.inf
    half = (1.0 - level) / 2.0
    far = count + 20.0 * math.sqrt(count) + 40.0
    most = _bisect(lambda x: half - gamma_tail(count, x), 0.0, far)
    least = _bisect(lambda x: (1.0 - half) - gamma_tail(count, x), 0.0, far)
    return total / most, total / least


def mean_interval(values: Array, least_sd: float = 0.0, level: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of `values` [N], whose spread is taken as `least_sd` at least."""
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    sd = max(float(np.std(values, ddof=1)), least_sd)
    half = _student_quantile(count - 1, level) * sd / math.sqrt(count)
    mean = float(np.mean(values))
    return mean - half, mean + half


def _student_quantile(freedom: int, level: float) -> float:
    """What Student's |t| stays below with probability `level`."""
    if freedom >= _MIN_SERIES_DF:
        z = _bisect(lambda x: math.erf(x / math.sqrt(2.0)) - level, 0.0, 40.0)
        return z + (z**3 + z) / (4.0 * freedom) + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    return _bisect(lambda t: _student_coverage(freedom, t) - level, 0.0, 1e6)


def _student_coverage(freedom: int, t: float) -> float:
    """The probability that Student's |t| is below `t`, a finite sum for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    if freedom == 1:
        return 2.0 * angle / math.pi
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * ((k - 1) / k)
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function passes 0, by halving."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)


# ------------------------------------------------------------------------------- many tests
def adjust_p_values(p_values: Sequence[float], correction: str = "holm") -> list[float]:
    """The p-values of tests made together, any of which falls below a level by chance so often at most.

    Both Holm's (1979) and Bonferroni's hold however the tests hang together.
    """
    if correction not in CORRECTIONS:
        raise InputError("correction", f"must be one of {', '.join(CORRECTIONS)}", correction)
    count = len(p_values)
    if correction == "bonferroni":
        return [min(1.0, count * p) for p in p_values]
    out, worst = [0.0] * count, 0.0
    for rank, at in enumerate(sorted(range(count), key=lambda one: p_values[one])):
        worst = max(worst, min(1.0, (count - rank) * p_values[at]))
        out[at] = worst
    return out


def randomized_p_value(scheme: WatermarkScheme, count: int, total: float, u: float) -> float:
    """A p-value that is uniform in unmarked text if `u` is, although counts are lumpy.

    It is P(X > total) + u P(X = total). The p-value proper has u = 1: it may be too large, never too small.
    """
    at_least = scheme.p_value(count, total)
    above = scheme.p_value(count, total + 1e-5)
    return above + u * (at_least - above)


def required_tokens(
    scheme: WatermarkScheme, score: float, alpha: float = 0.01, power: float = 0.9
) -> int | None:
    """How many scored tokens of mean value `score` it takes to be found at level `alpha` so often.

    The level is exact, the marked text's sum taken as normal with the unmarked one's spread. None: no number
    of tokens suffices, the score being no higher than unmarked text's.
    """
    if not 0.0 < alpha < 1.0 or not 0.0 < power < 1.0:
        raise InputError("alpha", "and `power` must lie between 0 and 1", (alpha, power))
    if score <= scheme.null_mean:
        return None
    below = _bisect(lambda z: 0.5 * math.erfc(-z / math.sqrt(2.0)) - power, -40.0, 40.0) * scheme.null_std

    def enough(count: int) -> bool:
        return scheme.p_value(count, count * score - below * math.sqrt(count)) <= alpha

    high = 1
    while not enough(high):
        high *= 2
        if high > 2**24:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
