"""Window scan: finds a marked passage inside unmarked text, on a fixed grid of windows."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from descant.core.interfaces import Array
from descant.decoding.watermark.scores import TokenScores, WatermarkScheme

__all__ = ["ScoreWindow", "passage_edges", "scan_windows", "window_grid"]

_MIN_WINDOW_SIZE: Final = 16  # scored tokens; smaller windows could hardly outweigh the correction
_STEPS_PER_WINDOW: Final = 2  # windows overlap by half


class ScoreWindow(NamedTuple):
    """A run of scored tokens and its p-value in unmarked text."""

    first: int  # index among the scored tokens
    stop: int
    total: float
    p_value: float
    num_tests: int  # correction factor for all windows scanned

    @property
    def corrected_p_value(self) -> float:
        """The p-value corrected for the windows of this text; values above 1 still rank windows."""
        return self.p_value * self.num_tests


def window_grid(count: int) -> list[tuple[int, Array]]:
    """Return the window sizes for `count` scored tokens, largest first, with the starts of each size.

    The grid depends only on the number of tokens, never on their scores; otherwise the correction is invalid.
    """
    grid = [(count, np.zeros(1, np.int64))]
    size = 1 << max(count - 1, 0).bit_length() >> 1  # the largest power of two below `count`
    while size >= _MIN_WINDOW_SIZE:
        starts = np.arange(0, count - size + 1, size // _STEPS_PER_WINDOW)
        if starts[-1] != count - size:
            starts = np.append(starts, count - size)
        grid.append((size, starts))
        size //= 2
    return grid


def scan_windows(scheme: WatermarkScheme, values: Array, windows: bool) -> list[ScoreWindow]:
    """Return the most significant window of each size over the values [N]; the first is the whole text.

    Each size has the same share of the error rate, and each window the same share of its size's. A watermark
    over the whole text is only corrected for the number of sizes.
    """
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    grid = window_grid(count) if windows else [(count, np.zeros(1, np.int64))]
    best_windows = []
    for size, starts in grid:
        totals = sums[starts + size] - sums[starts]
        best = int(np.argmax(totals))  # windows of one size: the largest sum has the smallest p-value
        first = int(starts[best])
        # Summed again: differences of cumulative sums lose digits, and a lost tie makes the p-value too
        # small.
        total = float(values[first : first + size].sum())
        p = scheme.p_value(size, total) if size else 1.0
        best_windows.append(ScoreWindow(first, first + size, total, p, len(starts) * len(grid)))
    return best_windows


def passage_edges(
    scheme: WatermarkScheme, scores: TokenScores, window: ScoreWindow, earliest: int = 0
) -> tuple[int, int]:
    """Estimate where the passage of a window starts (at `earliest` or later) and ends.

    The maximum likelihood edges around the window's middle: tokens count by their distance from the midpoint
    between the means of unmarked text and of the window. The estimate has no error rate of its own.
    """
    positions = np.flatnonzero(scores.mask)
    values = scores.values[positions]
    mean = window.total / (window.stop - window.first)
    cumulative = np.concatenate([[0.0], np.cumsum(values - 0.5 * (scheme.null_mean + mean))])
    middle = (window.first + window.stop) // 2
    first = int(np.argmin(cumulative[: middle + 1]))
    stop = middle + 1 + int(np.argmax(cumulative[middle + 1 :]))
    # The first tokens of a passage are contexts only, so the passage starts `context_size` tokens earlier.
    begin = max(earliest, int(positions[first]) - scheme.context_size)
    return begin, int(positions[stop - 1]) + 1
