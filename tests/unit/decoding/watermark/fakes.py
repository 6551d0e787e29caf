"""A watermark scheme for tests of the common parts: a quarter of all token pairs are marked."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from descant.config.watermarking_config import BaseWatermarkingConfig, WatermarkingConfig
from descant.decoding.watermark.statistics import TokenScores, binomial_tail, proportion_interval

Array = np.ndarray[Any, np.dtype[Any]]


class Counting:
    """Counts the tokens that the key pairs with those before them, by a hash of its own."""

    name = "counting"
    null_mean = 0.25
    null_std = math.sqrt(0.25 * 0.75)
    min_marked_mean = 0.4
    nonce: int | None = None

    def __init__(self, key: int = 1, width: int = 1) -> None:
        self.settings: BaseWatermarkingConfig = WatermarkingConfig(hashing_key=key)
        self.context_size = width
        self.prompt_reach = width
        self.calls = 0

    def member(self, context: tuple[int, ...], token: int) -> bool:
        """Whether the key pairs them."""
        text = repr((self.settings._secret, context[len(context) - self.context_size :], token)).encode()
        return hashlib.blake2b(text, digest_size=2).digest()[0] < 64

    def score_tokens(self, ids: Array) -> TokenScores:
        """Each pair once."""
        self.calls += 1
        run = [int(one) for one in ids]
        scored, value, seen = np.zeros(len(run), bool), np.zeros(len(run)), set()
        for at in range(self.context_size, len(run)):
            question = tuple(run[at - self.context_size : at + 1])
            if question not in seen:
                seen.add(question)
                scored[at] = True
                value[at] = self.member(question[:-1], question[-1])
        return TokenScores(scored, value)

    def p_value(self, count: int, total: float) -> float:
        """The binomial one."""
        return binomial_tail(count, math.ceil(total - 1e-6), self.null_mean)

    def confidence_interval(self, values: Array) -> tuple[float, float]:
        """That of a proportion."""
        return proportion_interval(len(values), round(float(values.sum())))

    def write(self, rng: np.random.Generator, count: int, before: int, strength: float = 0.7) -> list[int]:
        """A marked text after the token `before`: so often a paired token is sought, else any."""
        run = [before] * self.context_size
        for _ in range(count):
            token = int(rng.integers(0, 5000))
            if rng.random() < strength:
                while not self.member(tuple(run), token):
                    token = int(rng.integers(0, 5000))
            run.append(token)
        return run[self.context_size :]
