"""The tested watermark schemes, and the random keys of texts and tests."""

from __future__ import annotations

import random

from descant.config.watermarking_config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

__all__ = ["MARKS", "marking_config", "random_config", "unrelated_config"]

MARKS = ("lefthash", "selfhash", "synthid", "gumbel")
_DEPTH, _NGRAM = 30, 5
_SELFHASH_WIDTH = 4  # context width of selfhash, the token itself included


# Number of consecutive texts that share a key where keys are expensive: marked texts, and tests of unmarked.
_TEXTS_PER_KEY = {"selfhash": 11, "synthid": 3}
_TESTS_PER_KEY = {"selfhash": 28}


def marking_config(mark: str, model: str, method: str, index: int) -> BaseWatermarkingConfig:
    """The config that marks a text."""
    return random_config(mark, model, method, index // _TEXTS_PER_KEY.get(mark, 1))


def unrelated_config(mark: str, model: str, method: str, index: int, turn: int) -> BaseWatermarkingConfig:
    """A config with a key unrelated to a text, a different one for each turn."""
    return random_config(mark, "another", model, method, index // _TESTS_PER_KEY.get(mark, 1), turn)


def random_config(mark: str, *tag: object) -> BaseWatermarkingConfig:
    """The config of a scheme with a random key, seeded by `tag`."""
    rng = random.Random("/".join(map(str, (mark, *tag))))
    if mark == "synthid":
        keys = tuple(rng.randrange(2**32) for _ in range(_DEPTH))
        return SynthIDTextWatermarkingConfig(_NGRAM, keys)
    key = rng.randrange(2**20, 2**31)
    if mark == "gumbel":
        return GumbelWatermarkingConfig(key)
    if mark == "selfhash":
        return WatermarkingConfig(hashing_key=key, seeding_scheme="selfhash", context_width=_SELFHASH_WIDTH)
    return WatermarkingConfig(hashing_key=key)
