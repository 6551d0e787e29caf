"""Statistics of watermark detection: exact tail probabilities, intervals, and multiple-test corrections.

Tails are computed from logarithms, so that a tail of 1e-300 is as accurate as one of 0.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch

from descant.config.watermarking_config import BaseWatermarkingConfig
from descant.core.interfaces import Array
from descant.errors import InputError


class TokenScores(NamedTuple):
    """Scores of a text's tokens under one key.

    A token is scored only if its keyed function has a new input. Equal inputs give equal outputs, so counting
    them twice would make chance look like a watermark.
    """

    mask: Array  # [L] bool
    values: Array  # [L] float64, 0 where not scored; larger values are evidence for the watermark

    @classmethod
    def at(cls, positions: Array, values: Array, length: int) -> Self:
        """The scores of a text of `length` tokens, of which those at `positions` [N] have `values` [N]."""
        scores = cls(np.zeros(length, dtype=bool), np.zeros(length))
        scores.mask[positions], scores.values[positions] = True, values
        return scores


class WatermarkScheme(ABC):
    """One watermark with one key (and one nonce), as the detector uses it.

    In text written without the key, the values of scored tokens are independent draws from one known
    distribution. Their sum is the test statistic.
    """

    name: str  # "green list", "synthid" or "gumbel"
    settings: BaseWatermarkingConfig  # that the text was marked with
    null_mean: float  # mean of a value in unmarked text
    null_std: float  # standard deviation of a value in unmarked text
    min_marked_mean: (
        float  # mean value that even a weakly marked text reaches; a lower one means no watermark
    )
    context_size: int  # number of preceding tokens that a token's value depends on
    prompt_reach: int = 0  # number of prompt tokens in a context; 0: only generated tokens count
    nonce: int | None = None  # of the sequence, for schemes with one

    @abstractmethod
    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L]; tokens without a full context are not scored."""

    @abstractmethod
    def p_value(self, count: int, total: float) -> float:
        """Probability that `count` scored tokens of unmarked text sum to `total` or more."""

    @abstractmethod
    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % confidence interval of the mean of the scored tokens' values [N]."""


CORRECTIONS: Final = ("holm", "bonferroni")
# Totals are float sums: a total this close above an atom of the distribution is that atom.
_SLACK: Final = 1e-9
_MAX_LATTICE_SIZE: Final = 2**16  # support size up to which a weighted sum is convolved exactly
_TAIL: Final = 0.025  # beyond each end of a 95 % interval
_NEAR_ZERO: Final = 1e-3  # |w| below which the saddlepoint formula is 0/0 and its limit is used
_MIN_SERIES_DF: Final = 200  # degrees of freedom from which Student's quantile is a series expansion


# ------------------------------------------------------------------------------------ tails
def binomial_tail(count: int, hits: int, p: float) -> float:
    """Probability of `hits` or more successes in `count` trials with probability `p`."""
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
    # Below the mean, the complement is smaller and 1 minus it is accurate.
    k = np.arange(hits - 1, 0, -1, dtype=np.float64)
    ratio = k / (count - k + 1.0) * ((1.0 - p) / p)
    return 1.0 - _sum_series(_binomial_log(count, hits - 1, p), ratio)


def gamma_tail(count: int, total: float) -> float:
    """Probability that `count` unit exponential draws sum to `total` or more."""
    if count <= 0 or total <= 0.0:
        return 1.0 if total <= 0.0 else 0.0
    counts, totals = torch.tensor([(count, total)], dtype=torch.float64).T
    return float(torch.special.gammaincc(counts, totals))


def weighted_tail(count: int, weights: Array, p: float, total: float) -> float:
    """Probability that the sums of `count` tokens reach `total`, each weight [D] added with probability `p`.

    Equal weights are a binomial distribution. If the weights are integer multiples of one number, as linear
    weights are, and the support is small, the distribution is convolved exactly. Otherwise the Lugannani-Rice
    saddlepoint formula (1980, Adv. Appl. Prob. 12) with lattice correction is used: its relative error
    against the exact tail is below 0.1 % for tails above 1e-30.
    """
    weights = np.asarray(weights, np.float64)
    max_total = count * float(weights.sum())
    slack = _SLACK * max(1.0, max_total)
    if total <= slack:
        return 1.0
    if total > max_total + slack or p <= 0.0:
        return 0.0
    if p >= 1.0:
        return 1.0
    depth = len(weights)
    if float(np.ptp(weights)) <= _SLACK * float(weights[0]):
        return binomial_tail(count * depth, math.ceil(total / float(weights.mean()) - 1e-6), p)
    step = _lattice_step(weights)
    if step is not None and max_total / step <= _MAX_LATTICE_SIZE:
        return _convolution_tail(
            count, np.rint(weights / step).astype(np.int64), p, math.ceil(total / step - 1e-6)
        )
    if step is not None:
        total = step * math.ceil(total / step - 1e-6)
    return _saddlepoint_tail(count, weights, p, total, step or 0.0)


def _sum_series(log_first: float, ratio: Array) -> float:
    """Sum of a series, given the logarithm of its first term and the ratios of successive terms."""
    series = 1.0 + float(np.cumprod(ratio).sum())
    return min(1.0, math.exp(min(0.0, log_first + math.log(series))))


def _binomial_log(count: int, k: int, p: float) -> float:
    log_ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return log_ways + k * math.log(p) + (count - k) * math.log1p(-p)


# ------------------------------------------------------------------- weighted sums
def _lattice_step(weights: Array) -> float | None:
    """The largest number, not too small, that all weights are integer multiples of, or None."""
    smallest = float(weights.min())
    if smallest <= 0.0:
        return None
    for divisor in range(1, 257):
        multiples = weights * (divisor / smallest)
        if float(np.abs(multiples - np.rint(multiples)).max()) < 1e-7:
            return smallest / divisor
    return None


def _convolution_tail(count: int, weights: Array, p: float, hits: int) -> float:
    """Exact tail of a sum with integer weights [D], by Fourier transform of the tilted distribution.

    The tilt makes `hits` the mean, so that rounding errors are small relative to the sum.
    """
    max_total = count * int(weights.sum())
    if hits >= max_total:  # the last atom, which no finite tilt has as its mean
        return math.exp(count * len(weights) * math.log(p)) if hits == max_total else 0.0
    float_weights = weights.astype(np.float64)
    s = _solve_saddlepoint(count, float_weights, p, float(hits))
    if s < 0.0:  # the larger tail: use the complement, which is small
        return 1.0 - _convolution_tail(count, weights, 1.0 - p, max_total - hits + 1)
    probs = np.ones(1)  # distribution of one token
    for weight in weights:
        tilted_p = _tilted_prob(p, s * float(weight))
        extended = np.zeros(len(probs) + int(weight))
        extended[: len(probs)] += probs * (1.0 - tilted_p)
        extended[int(weight) :] += probs * tilted_p
        probs = extended
    size = 1 << max_total.bit_length()
    masses = np.fft.irfft(np.fft.rfft(probs, size) ** count, size)[hits : max_total + 1]
    excess = np.arange(len(masses), dtype=np.float64)
    tilted = float((np.maximum(masses, 0.0) * np.exp(-s * excess)).sum())
    return min(1.0, tilted * math.exp(min(0.0, _cumulant(count, float_weights, p, s) - s * hits)))


def _saddlepoint_tail(count: int, weights: Array, p: float, total: float, step: float) -> float:
    """Saddlepoint approximation of the tail, for values that are multiples of `step` (0: continuous)."""
    max_total = count * float(weights.sum())
    # The formula is undefined at the last atom: anything closer to it than the smallest weight is that atom.
    if total > max_total - float(weights.min()) * (1.0 - _SLACK):
        return math.exp(count * len(weights) * math.log(p))
    s = _solve_saddlepoint(count, weights, p, total)
    tilted_p = np.array([_tilted_prob(p, s * float(weight)) for weight in weights])
    variance = count * float((weights**2 * tilted_p * (1.0 - tilted_p)).sum())
    w = math.copysign(math.sqrt(max(0.0, 2.0 * (s * total - _cumulant(count, weights, p, s)))), s)
    if abs(w) < _NEAR_ZERO:
        third = count * float((weights**3).sum()) * p * (1.0 - p) * (1.0 - 2.0 * p)
        gap = -third / (6.0 * variance * math.sqrt(variance)) + 0.5 * step / math.sqrt(variance)
    else:
        # Daniels' first continuity correction for lattice distributions.
        slope = -math.expm1(-s * step) / step if step > 0.0 else s
        gap = 1.0 / (slope * math.sqrt(variance)) - 1.0 / w
    density = math.exp(-0.5 * w * w) / math.sqrt(2.0 * math.pi)
    return min(1.0, max(0.0, 0.5 * math.erfc(w / math.sqrt(2.0)) + density * gap))


def _tilted_prob(p: float, x: float) -> float:
    """Success probability `p` after exponential tilting by `x`."""
    odds = math.log(p) - math.log1p(-p) + x
    return 1.0 / (1.0 + math.exp(-odds)) if odds >= 0.0 else math.exp(odds) / (1.0 + math.exp(odds))


def _cumulant(count: int, weights: Array, p: float, s: float) -> float:
    return count * float(np.logaddexp(math.log1p(-p), math.log(p) + s * weights).sum())


def _solve_saddlepoint(count: int, weights: Array, p: float, total: float) -> float:
    """The tilt under which `total` is the mean, by safeguarded Newton iteration."""
    scale = float(weights.max())
    low, high = -60.0 / float(weights.min()), 60.0 / float(weights.min())
    s, target = 0.0, total / count
    for _ in range(200):
        exponent = math.log(p) - math.log1p(-p) + s * weights
        tilted_p = 0.5 * (1.0 + np.tanh(0.5 * exponent))
        error = float((weights * tilted_p).sum()) - target
        low, high = (s, high) if error < 0.0 else (low, s)
        slope = float((weights**2 * tilted_p * (1.0 - tilted_p)).sum())
        candidate = s - error / slope if slope > 0.0 else math.inf
        if not low < candidate < high:
            candidate = 0.5 * (low + high)
        if abs(candidate - s) * scale < 1e-13:
            return candidate
        s = candidate
    return s


# --------------------------------------------------------------------------------- intervals
def proportion_interval(count: int, hits: int) -> tuple[float, float]:
    """95 % confidence interval of a success probability (Clopper and Pearson 1934)."""
    if count <= 0:
        return 0.0, 1.0

    def lower_bound(successes: int) -> float:
        if successes <= 0:
            return 0.0
        return _bisect(lambda p: binomial_tail(count, successes, p) - _TAIL, 0.0, successes / count)

    # At most `hits` successes means at least `count - hits` failures.
    return lower_bound(hits), 1.0 - lower_bound(count - hits)


def gamma_interval(count: int, total: float) -> tuple[float, float]:
    """95 % confidence interval of the mean of exponential values; conservative for less variable ones."""
    if count <= 0:
        return 0.0, math.inf
    upper_limit = count + 20.0 * math.sqrt(count) + 40.0
    high = _bisect(lambda x: _TAIL - gamma_tail(count, x), 0.0, upper_limit)
    low = _bisect(lambda x: (1.0 - _TAIL) - gamma_tail(count, x), 0.0, upper_limit)
    return total / high, total / low


def mean_interval(values: Array, min_std: float = 0.0) -> tuple[float, float]:
    """Student's 95 % interval of the mean of `values` [N], with a deviation of at least `min_std`."""
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    std = max(float(np.std(values, ddof=1)), min_std)
    half_width = _student_quantile(count - 1) * std / math.sqrt(count)
    mean = float(np.mean(values))
    return mean - half_width, mean + half_width


def _student_quantile(df: int) -> float:
    """The bound that Student's |t| stays below with a probability of 95 %."""
    if df >= _MIN_SERIES_DF:
        z = NormalDist().inv_cdf(1.0 - _TAIL)
        return z + (z**3 + z) / (4.0 * df) + (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * df**2)
    return _bisect(lambda t: _student_coverage(df, t) - (1.0 - 2.0 * _TAIL), 0.0, 1e6)


def _student_coverage(df: int, t: float) -> float:
    """Probability that Student's |t| is below `t`, a finite sum for integer degrees of freedom."""
    angle = math.atan2(t, math.sqrt(df))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = df % 2
    if df == 1:
        return 2.0 * angle / math.pi
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= square * ((k - 1) / k)
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Root of an increasing function by bisection."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)


# ----------------------------------------------------------------------- multiple tests
def adjust_p_values(p_values: Sequence[float], correction: str = "holm") -> list[float]:
    """Adjust the p-values of several tests for the family-wise error rate.

    Holm (1979) and Bonferroni are both valid under any dependence between the tests.
    """
    if correction not in CORRECTIONS:
        raise InputError("correction", f"must be one of {', '.join(CORRECTIONS)}", correction)
    count = len(p_values)
    if correction == "bonferroni":
        return [min(1.0, count * p) for p in p_values]
    adjusted, running_max = [0.0] * count, 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        running_max = max(running_max, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running_max
    return adjusted


def required_tokens(scheme: WatermarkScheme, score: float, alpha: float = 0.01) -> int | None:
    """Number of scored tokens of mean `score` that reach level `alpha` in nine of ten texts.

    The level is exact; the sum of marked text is approximated as normal with the spread of unmarked text.
    None if the score is not above that of unmarked text.
    """
    if not 0.0 < alpha < 1.0:
        raise InputError("alpha", "must be between 0 and 1", alpha)
    if score <= scheme.null_mean:
        return None
    margin = NormalDist().inv_cdf(0.9) * scheme.null_std

    def is_enough(count: int) -> bool:
        return scheme.p_value(count, count * score - margin * math.sqrt(count)) <= alpha

    high = 1
    while not is_enough(high):
        high *= 2
        if high > 2**24:
            return None
    low = high // 2
    while high - low > 1:
        mid = (low + high) // 2
        low, high = (low, mid) if is_enough(mid) else (mid, high)
    return high


class PaddingTokens(NamedTuple):
    """The tokens that pad the rows of a batch, and which of them also end a text."""

    ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, source: Any) -> Self:
        """Those of a model config or a tokenizer; without a pad token, generate() pads with the end token."""
        end_ids = _as_ids(getattr(source, "eos_token_id", None))
        return cls(_as_ids(getattr(source, "pad_token_id", None)) or end_ids, end_ids)

    def text_span(self, ids: Array) -> tuple[int, int]:
        """Where the text of a row [L] starts and stops; the first end token of a run on the right is text."""
        is_text = ~np.isin(ids, list(self.ids))
        if not is_text.any():
            return 0, 0
        positions = np.flatnonzero(is_text)
        start, stop = int(positions[0]), int(positions[-1]) + 1
        if stop < len(ids) and int(ids[stop]) in self.end_ids:
            stop += 1
        return start, stop


def _as_ids(value: Any) -> frozenset[int]:
    """No token id, one or several as a set."""
    if isinstance(value, int) and not isinstance(value, bool):
        return frozenset({value})
    return frozenset(value) if isinstance(value, list | tuple) else frozenset()
