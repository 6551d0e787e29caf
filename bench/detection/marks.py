"""The marks that are tested, and the random keys of texts and of tests."""

from __future__ import annotations

import random

from descant.decoding.watermark.schemes import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

__all__ = ["MARKS", "drawn", "other", "own"]

MARKS = ("lefthash", "selfhash", "synthid", "gumbel")
_DEPTH, _NGRAM = 30, 5
_SELF = 4  # tokens that selfhash looks at, the token itself among them


# Neighbouring texts that share a key where one is dear to make: as marked ones, and as unmarked ones tested.
_MARKED = {"selfhash": 11, "synthid": 3}
_TESTED = {"selfhash": 28}


def own(mark: str, model: str, way: str, place: int) -> BaseWatermarkingConfig:
    """The settings that mark a text."""
    return drawn(mark, model, way, place // _MARKED.get(mark, 1))


def other(mark: str, model: str, way: str, place: int, turn: int) -> BaseWatermarkingConfig:
    """The settings of a key that has nothing to do with a text, another one each turn."""
    return drawn(mark, "another", model, way, place // _TESTED.get(mark, 1), turn)


def drawn(mark: str, *tag: object) -> BaseWatermarkingConfig:
    """A mark's settings with the random key that `tag` draws: another one for every other tag."""
    chance = random.Random("/".join(map(str, (mark, *tag))))
    if mark == "synthid":
        keys = tuple(chance.randrange(2**32) for _ in range(_DEPTH))
        return SynthIDTextWatermarkingConfig(_NGRAM, keys)
    key = chance.randrange(2**20, 2**31)
    if mark == "gumbel":
        return GumbelWatermarkingConfig(key)
    if mark == "selfhash":
        return WatermarkingConfig(hashing_key=key, seeding_scheme="selfhash", context_width=_SELF)
    return WatermarkingConfig(hashing_key=key)
