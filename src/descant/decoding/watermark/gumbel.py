"""The Gumbel watermark found again: marked text is made of tokens that had luck under the key."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from descant.decoding.watermark.schemes import GumbelWatermarkingConfig
from descant.decoding.watermark.schemes.gumbel import get_keyed_uniforms
from descant.decoding.watermark.scores import Array, TokenScores
from descant.decoding.watermark.statistics import gamma_tail
from descant.errors import InputError

__all__ = ["GumbelScheme"]

# A token of chance p that won the race is worth the harmonic number of 1/p, about 1 + 0.8 times the nats of
# its law: marked text that says a quarter of a nat a token, less than code does, comes to this.
_MIN_MARKED_MEAN: Final = 1.2


class GumbelScheme:
    """One key and one nonce of the Gumbel watermark.

    A token is worth -log u, u being its uniform: under a key that the text does not know a draw of the unit
    exponential law, and the more the better its place in the race was. Their sum is the best statistic as
    long as nothing is known of the chances the tokens had (Aaronson 2022). A token is scored where it was
    raced: after `context_width` others that have not come in that order before.
    """

    name = GumbelWatermarkingConfig.scheme
    null_mean = 1.0
    null_std = 1.0
    min_marked_mean = _MIN_MARKED_MEAN

    def __init__(self, settings: GumbelWatermarkingConfig, nonce: int | None = None) -> None:
        nonce = settings.nonce if nonce is None else nonce
        if nonce is None:
            do = "make one scheme for each of `nonces`"
            raise InputError("nonce", "must be given where the settings have none", None, do)
        self.settings = settings
        self.nonce = nonce
        self.context_size = settings.context_width
        self._uniforms = get_keyed_uniforms(settings)

    def score_tokens(self, ids: Array) -> TokenScores:
        """How well each token [L] was placed; it is scored unless its context is short or a repeat."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        scored = _first_occurrences(ids.tobytes(), self.context_size).copy()
        value = np.zeros(len(ids))
        places = np.flatnonzero(scored)
        if len(places):
            contexts = np.lib.stride_tricks.sliding_window_view(ids, self.context_size)[
                places - self.context_size
            ]
            words = self._uniforms.context_states_on_host(contexts, self.nonce)
            value[places] = -np.log(self._uniforms.token_uniforms(words, ids[places]))
        return TokenScores(scored, value)

    def p_value(self, count: int, total: float) -> float:
        """The probability that so many draws of the unit exponential law sum to `total` or more."""
        return gamma_tail(count, total)


@lru_cache(maxsize=256)  # many keys and nonces are asked about one text
def _first_occurrences(ids: bytes, width: int) -> Array:
    """Which tokens follow a context for the first time [L]; the ids are int64."""
    count, size = len(ids) // 8, 8 * width
    scored = np.zeros(count, dtype=bool)
    known: set[bytes] = set()
    for place in range(width, count):
        context = ids[8 * place - size : 8 * place]
        scored[place] = context not in known
        known.add(context)
    return scored
