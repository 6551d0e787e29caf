"""Evidence: what the tokens of a text say for a mark, one number each, and what unmarked text would say."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from descant.decoding.watermark.schemes import BaseWatermarkingConfig

__all__ = ["Array", "TokenScores", "WatermarkScheme"]

Array = np.ndarray[Any, np.dtype[Any]]


class TokenScores(NamedTuple):
    """A text's tokens as a watermark sees them.

    A token is scored if the keyed function was asked something there that it was not asked before: what is
    asked twice is answered alike, and counting it twice would make chance look like a mark.
    """

    mask: Array  # [L] bool
    values: Array  # [L] float64, 0 where not scored: the larger, the more it speaks for the mark


class WatermarkScheme(Protocol):
    """One watermark with one key (and one nonce), as a detector asks it.

    In a text that was written without knowledge of the key the values of scored tokens are independent draws
    of one known law, whatever the text: their sum is the statistic.
    """

    @property
    def name(self) -> str:
        """Of the scheme: "green list", "synthid", "gumbel"."""
        ...

    @property
    def settings(self) -> BaseWatermarkingConfig:
        """What marks."""
        ...

    @property
    def null_mean(self) -> float:
        """Of one value in unmarked text."""
        ...

    @property
    def null_std(self) -> float:
        """The standard deviation of one value in unmarked text."""
        ...

    @property
    def min_marked_mean(self) -> float:
        """The mean value that even a weakly marked text reaches: below it there is no mark."""
        ...

    @property
    def context_size(self) -> int:
        """How many tokens before a token its value hangs on."""
        ...

    def score_tokens(self, ids: Array) -> TokenScores:
        """What the tokens [L] say; those too early to have a context are not scored."""
        ...

    def p_value(self, count: int, total: float) -> float:
        """The probability that `count` scored tokens of unmarked text sum to `total` or more."""
        ...
