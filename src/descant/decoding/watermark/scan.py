"""Windows: a marked passage inside unmarked text, sought on a grid of passages that is fixed beforehand."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from descant.decoding.watermark.scores import Array, TokenScores, WatermarkScheme

__all__ = ["ScoreWindow", "passage_edges", "scan_windows", "window_grid"]

_MIN_WINDOW_SIZE: Final = 16  # scored tokens: fewer could hardly outweigh the correction for so many of them
_STEPS_PER_WINDOW: Final = 2  # a window's neighbour begins half of it later


class ScoreWindow(NamedTuple):
    """Some of a text's scored tokens, one after the other, and how odd they are in unmarked text."""

    first: int  # of the scored tokens, counted among themselves
    stop: int
    total: float
    p_value: float
    num_tests: int  # by which `p` must be multiplied for having looked at all the windows

    @property
    def corrected_p_value(self) -> float:
        """The p-value as far as this text and this key go; above 1 it still tells windows apart."""
        return self.p_value * self.num_tests


def window_grid(count: int) -> list[tuple[int, Array]]:
    """The sizes of the windows of `count` scored tokens, largest first, and where those of each size begin.

    It hangs on the number alone, never on what the tokens say, or the correction would not hold.
    """
    out = [(count, np.zeros(1, np.int64))]
    size = 1 << max(count - 1, 0).bit_length() >> 1  # the largest power of two below `count`
    while size >= _MIN_WINDOW_SIZE:
        starts = np.arange(0, count - size + 1, size // _STEPS_PER_WINDOW)
        if starts[-1] != count - size:
            starts = np.append(starts, count - size)
        out.append((size, starts))
        size //= 2
    return out


def scan_windows(scheme: WatermarkScheme, values: Array, windows: bool) -> list[ScoreWindow]:
    """The oddest window of each size, of the scored tokens' `values` [N]; the first one is the whole text.

    Each size has the same share of the error, each window the same share of its size's: a mark on the whole
    text pays for the number of sizes only.
    """
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    sizes = window_grid(count) if windows else [(count, np.zeros(1, np.int64))]
    found = []
    for size, starts in sizes:
        totals = sums[starts + size] - sums[starts]
        at = int(np.argmax(totals))  # all have as many tokens, so the largest sum is the oddest
        first = int(starts[at])
        # Summed afresh: differences of running sums lose digits, and a tie lost is a p-value too small.
        total = float(values[first : first + size].sum())
        p = scheme.p_value(size, total) if size else 1.0
        found.append(ScoreWindow(first, first + size, total, p, len(starts) * len(sizes)))
    return found


def passage_edges(
    scheme: WatermarkScheme, evidence: TokenScores, window: ScoreWindow, earliest: int = 0
) -> tuple[int, int]:
    """Where in the text the passage of a window seems to begin (`earliest` or later) and to end.

    The most likely pair of edges about the window's middle: tokens count by how far they are above the
    midway between unmarked text and the window. This is an estimate without an error rate of its own.
    """
    where = np.flatnonzero(evidence.mask)
    values = evidence.values[where]
    score = window.total / (window.stop - window.first)
    lead = np.concatenate([[0.0], np.cumsum(values - 0.5 * (scheme.null_mean + score))])
    middle = (window.first + window.stop) // 2
    first = int(np.argmin(lead[: middle + 1]))
    stop = middle + 1 + int(np.argmax(lead[middle + 1 :]))
    # The passage's own first tokens are there as contexts only: a mark that hangs on them begins with them.
    begin = max(earliest, int(where[first]) - scheme.context_size)
    return begin, int(where[stop - 1]) + 1
