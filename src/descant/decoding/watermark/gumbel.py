"""Detection scheme of the Gumbel watermark: marked tokens have small keyed uniforms."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from descant.core.interfaces import Array
from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from descant.decoding.watermark.schemes.gumbel import get_keyed_uniforms
from descant.decoding.watermark.scores import TokenScores
from descant.decoding.watermark.statistics import gamma_interval, gamma_tail
from descant.errors import InputError

__all__ = ["GumbelScheme"]

# A token of probability p that won the draw has the harmonic number of 1/p as its expected value, about 1 +
# 0.8 times the entropy in nats. This is the mean at a quarter of a nat per token, less than source code has.
_MIN_MARKED_MEAN: Final = 1.2


class GumbelScheme:
    """One key and one nonce of the Gumbel watermark.

    A token's value is -log u, u being its keyed uniform. Without the key this is a unit exponential draw; in
    marked text it is larger. The sum is the best statistic if the token probabilities are unknown (Aaronson
    2022). A token is scored if it was drawn by the watermark: after `context_width` tokens that have not
    occurred in that order before.
    """

    name = GumbelWatermarkingConfig.scheme
    null_mean = 1.0
    null_std = 1.0
    min_marked_mean = _MIN_MARKED_MEAN
    prompt_reach = 0

    def __init__(self, settings: GumbelWatermarkingConfig, nonce: int | None = None) -> None:
        nonce = settings.nonce if nonce is None else nonce
        if nonce is None:
            do = "create one scheme per nonce below `nonces`"
            raise InputError("nonce", "must be given if the settings have no nonce", None, do)
        self.settings = settings
        self.nonce = nonce
        self.context_size = settings.context_width
        self._uniforms = get_keyed_uniforms(settings)

    def score_tokens(self, ids: Array) -> TokenScores:
        """Score each token [L] whose context is complete and new."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        scored = _first_occurrences(ids.tobytes(), self.context_size).copy()
        values = np.zeros(len(ids))
        positions = np.flatnonzero(scored)
        if len(positions):
            contexts = np.lib.stride_tricks.sliding_window_view(ids, self.context_size)[
                positions - self.context_size
            ]
            states = self._uniforms.context_states_on_host(contexts, self.nonce)
            values[positions] = -np.log(self._uniforms.token_uniforms(states, ids[positions]))
        return TokenScores(scored, values)

    def p_value(self, count: int, total: float) -> float:
        """Probability that `count` unit exponential draws sum to `total` or more."""
        return gamma_tail(count, total)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """95 % interval of the mean, exact for exponential values."""
        return gamma_interval(len(values), float(values.sum()))


@lru_cache(maxsize=256)  # several keys and nonces are tested on one text
def _first_occurrences(ids: bytes, width: int) -> Array:
    """Mask of the tokens [L] that follow a context for the first time; `ids` are int64 bytes."""
    count, size = len(ids) // 8, 8 * width
    scored = np.zeros(count, dtype=bool)
    contexts: set[bytes] = set()
    for position in range(width, count):
        context = ids[8 * position - size : 8 * position]
        scored[position] = context not in contexts
        contexts.add(context)
    return scored
