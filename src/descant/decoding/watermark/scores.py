"""The interface of a watermark scheme, and the per-token scores it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from descant.core.interfaces import Array
from descant.decoding.watermark.schemes import BaseWatermarkingConfig

__all__ = ["Array", "TokenScores", "WatermarkScheme"]


class TokenScores(NamedTuple):
    """Scores of a text's tokens under one key.

    A token is scored only if its keyed function has a new input. Equal inputs give equal outputs, so counting
    them twice would make chance look like a watermark.
    """

    mask: Array  # [L] bool
    values: Array  # [L] float64, 0 where not scored; larger values are evidence for the watermark


class WatermarkScheme(Protocol):
    """One watermark with one key (and one nonce), as the detector uses it.

    In text written without the key, the values of scored tokens are independent draws from one known
    distribution. Their sum is the test statistic.
    """

    @property
    def name(self) -> str:
        """Name of the scheme: "green list", "synthid" or "gumbel"."""
        ...

    @property
    def settings(self) -> BaseWatermarkingConfig:
        """The settings the text was marked with."""
        ...

    @property
    def null_mean(self) -> float:
        """Mean of a value in unmarked text."""
        ...

    @property
    def null_std(self) -> float:
        """Standard deviation of a value in unmarked text."""
        ...

    @property
    def min_marked_mean(self) -> float:
        """Mean value that even a weakly marked text reaches; a lower mean means no watermark."""
        ...

    @property
    def context_size(self) -> int:
        """Number of preceding tokens that a token's value depends on."""
        ...

    @property
    def prompt_reach(self) -> int:
        """Number of prompt tokens that a context may include: 0 if only generated tokens count."""
        ...

    @property
    def nonce(self) -> int | None:
        """Nonce of the sequence, None for schemes without one."""
        ...

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score the tokens [L]; tokens without a full context are not scored."""
        ...

    def p_value(self, count: int, total: float) -> float:
        """Probability that `count` scored tokens of unmarked text sum to `total` or more."""
        ...

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % confidence interval of the mean of the scored tokens' values [N]."""
        ...
