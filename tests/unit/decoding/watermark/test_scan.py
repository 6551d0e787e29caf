"""A marked passage inside unmarked text: found, delimited, and not where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from descant.decoding.watermark.detection import ScoreWindow, passage_edges, scan_windows, window_grid
from descant.decoding.watermark.statistics import TokenScores
from tests.unit.decoding.watermark.fakes import Counting


def _best(scheme: Counting, values: np.ndarray) -> ScoreWindow:
    return min(scan_windows(scheme, values, windows=True), key=lambda one: one.corrected_p_value)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 32, 33, 100, 1000])
def test_the_grid_covers_the_text(count: int) -> None:
    sizes = window_grid(count)
    assert sizes[0][0] == count
    assert sizes[0][1].tolist() == [0]
    assert [size for size, _ in sizes] == sorted({size for size, _ in sizes}, reverse=True)
    for size, starts in sizes[1:]:
        assert size in (16, 32, 64, 128, 256, 512)
        assert starts[0] == 0
        assert starts[-1] + size == count
        assert np.all(np.diff(starts) <= size // 2)
        assert np.all(np.diff(starts) > 0)
    assert (len(sizes) > 1) == (count > 16)


def test_every_passage_holds_a_window_of_a_third_of_it() -> None:
    for count in (50, 200):
        windows = [(int(at), int(at) + size) for size, starts in window_grid(count) for at in starts]
        for first in range(count):
            for stop in range(first + 48, count + 1):
                inside = [two - one for one, two in windows if first <= one and two <= stop]
                assert max(inside) >= (stop - first) / 3


def test_the_correction_is_for_sizes_and_windows() -> None:
    windows = scan_windows(Counting(), np.zeros(100), windows=True)
    sizes = window_grid(100)
    assert [one.stop - one.first for one in windows] == [100, 64, 32, 16]
    assert [one.num_tests for one in windows] == [4 * len(starts) for _, starts in sizes]
    # The shares of the error add up to the whole.
    assert sum(len(starts) / (4 * len(starts)) for _, starts in sizes) == 1.0
    (whole,) = scan_windows(Counting(), np.zeros(100), windows=False)
    assert whole.num_tests == 1


def test_the_oddest_window_of_each_size_is_taken() -> None:
    values = np.zeros(120)
    values[40:72] = 1.0
    scheme = Counting()
    for (size, starts), one in zip(window_grid(120), scan_windows(scheme, values, windows=True), strict=True):
        totals = [values[at : at + size].sum() for at in starts]
        assert one.total == max(totals)
        assert one.p_value == min(scheme.p_value(size, total) for total in totals)


@pytest.mark.parametrize(("length", "passage"), [(400, 60), (400, 100), (1500, 100)])
def test_a_marked_passage_is_found_where_it_is(length: int, passage: int) -> None:
    scheme, rng = Counting(), np.random.default_rng(length + passage)
    found, overlaps = 0, []
    for _ in range(60):
        begin = int(rng.integers(0, length - passage))
        values = (rng.random(length) < 0.25).astype(float)
        values[begin : begin + passage] = rng.random(passage) < 0.65
        best = _best(scheme, values)
        if best.corrected_p_value <= 0.01:
            found += 1
            low, high = passage_edges(scheme, TokenScores(np.ones(length, bool), values), best)
            both = min(high, begin + passage) - max(low, begin)
            overlaps.append(max(0, both) / (max(high, begin + passage) - min(low, begin)))
    assert found >= 56
    assert np.median(overlaps) > 0.85
    assert np.quantile(overlaps, 0.1) > 0.6
    # The whole text does not tell it.
    assert scheme.p_value(1500, 1500 * 0.25 + 100 * 0.4) > 0.005


@pytest.mark.parametrize("length", [20, 400])
def test_unmarked_text_keeps_the_level(length: int) -> None:
    scheme, rng = Counting(), np.random.default_rng(length)
    corrected = np.array([
        _best(scheme, (rng.random(length) < 0.25).astype(float)).corrected_p_value for _ in range(3000)
    ])  # fmt: skip
    for level in (0.01, 0.05):
        assert (corrected <= level).mean() <= level + 3 * math.sqrt(level / 3000)
    assert (corrected <= 0.2).mean() > 0.03  # valid, but not by never speaking


def test_edges_are_in_tokens_and_leave_the_prompt_alone() -> None:
    scheme = Counting(width=3)
    scored = np.zeros(200, bool)
    scored[50::2] = True  # every other token of the second part
    value = np.zeros(200)
    value[100:160] = 1.0
    evidence = TokenScores(scored, np.where(scored, value, 0.0))
    best = _best(scheme, evidence.values[scored])
    assert passage_edges(scheme, evidence, best) == (97, 159)  # with the three tokens it hangs on
    value[50:160] = 1.0
    evidence = TokenScores(scored, np.where(scored, value, 0.0))
    best = _best(scheme, evidence.values[scored])
    assert passage_edges(scheme, evidence, best, earliest=49) == (49, 159)


def test_no_tokens_make_no_windows() -> None:
    (one,) = scan_windows(Counting(), np.zeros(0), windows=True)
    assert one == ScoreWindow(0, 0, 0.0, 1.0, 1)
