"""The race: uniform numbers that hang on a key, a nonce, a context and a token, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.core.counter_rng import WORD, mix
from descant.decoding.watermark.schemes.config import GumbelWatermarkingConfig

__all__ = ["Race", "race_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS: Final = 8  # of 64 bits, in a digest
_PURPOSE: Final = b"descant race"
_GOLDEN: Final = 0x9E3779B1


class Race:
    """The keyed uniforms: the smaller that of a token, the better its place in the race.

    A context and a nonce become two words by multilinear hashing with secret factors (Lemire and Kaser 2014,
    "Strongly universal string hashing is fast"): two of them share both words with a chance of 2**-63. The
    words then shuffle the 2**32 values that secretly stand for tokens. Integers decide, so every device
    agrees. It is thorough mixing and no cipher: who sees very many marked tokens of known chances might
    learn something of the key.
    """

    def __init__(self, settings: GumbelWatermarkingConfig) -> None:
        self.width = settings.context_width
        secret = _stream(settings.key, 2 * (self.width + 4))
        self._token = [int(one) & WORD for one in secret[:2].tolist()]
        self._factors = secret[2:].reshape(2, -1)  # [2, W + 3]: the tokens', the nonce's two, a constant
        self._held: dict[tuple[str, int], Tensor] = {}  # what a device wants again: factors, or words by size

    def states(self, contexts: Tensor, nonce: Tensor | int) -> Tensor:
        """The two words of each context [N, W] under a nonce, or each its own below 2**32 [N, 1]: [N, 2]."""
        factors = self._factors_on(contexts.device)
        sums = (contexts[:, None] * factors[:, : self.width]).sum(-1)  # int64 wraps around everywhere
        if isinstance(nonce, Tensor):
            sums = sums + nonce * factors[:, -3] + factors[:, -1]
        else:
            shift = torch.from_numpy(self._shift(nonce).view(np.int64))
            sums = sums + shift.to(contexts.device, non_blocking=True)
        return (sums >> 32) & WORD

    def words(self, contexts: Array, nonce: int) -> Array:
        """The same on the host, in uint32 lanes."""
        sums = contexts.astype(np.uint64) @ self._factors[:, : self.width].T + self._shift(nonce)
        return (sums >> np.uint64(32)).astype(np.uint32)

    def whole(self, states: Tensor, vocabulary: int) -> Tensor:
        """The uniforms of all tokens in float32 [N, V]: never 0, exact near it, and at most 1."""
        signs = self._signs_on(states.device, vocabulary)
        bits = mix(((signs ^ states[:, :1]) * (states[:, 1:] | 1)) & WORD)
        return bits.float().add_(0.5).mul_(2.0**-32)

    def each(self, words: Array, vocabulary: int) -> Iterator[Array]:
        """The same on the host, line by line [V], each in the place of the one before.

        In lanes half as wide a line stays in the nearest cache, which makes it ten times as fast.
        """
        signs = self._signs_on(torch.device("cpu"), vocabulary).numpy().astype(np.uint32)
        line, spare, even = np.empty_like(signs), np.empty_like(signs), np.empty(vocabulary, np.float32)
        for first, second in words:
            np.bitwise_xor(signs, first, out=line)
            line *= second | np.uint32(1)
            _mix(line, spare)
            np.add(line, np.float32(0.5), out=even, casting="unsafe", dtype=np.float32)
            even *= np.float32(2.0**-32)
            yield even

    def chosen(self, words: Array, tokens: Array) -> Array:
        """The uniforms of one token [M] in each state [M, 2], never 0 nor 1, in float64 [M]."""
        bits = tokens.astype(np.uint32) * np.uint32(_GOLDEN) + np.uint32(self._token[0])
        spare = np.empty_like(bits)
        _mix(bits, spare)
        bits ^= np.uint32(self._token[1])
        _mix(bits, spare)
        bits ^= words[:, 0]
        bits *= words[:, 1] | np.uint32(1)
        _mix(bits, spare)
        return (bits + 0.5) * 2.0**-32

    def _signs_on(self, device: torch.device, vocabulary: int) -> Tensor:
        """A secret word for each token, no two of them alike [V]."""
        place = (str(device), vocabulary)
        if place not in self._held:
            first, second = self._token
            counted = (torch.arange(vocabulary) * _GOLDEN + first) & WORD
            self._held[place] = mix(mix(counted) ^ second).to(device)
        return self._held[place]

    def _factors_on(self, device: torch.device) -> Tensor:
        place = (str(device), 0)
        if place not in self._held:
            self._held[place] = torch.from_numpy(self._factors.view(np.int64)).to(device)
        return self._held[place]

    def _shift(self, nonce: int) -> Array:
        """What a nonce adds to the sums [2]."""
        low, high = np.uint64(nonce & WORD), np.uint64(nonce >> 32)
        return self._factors[:, -3] * low + self._factors[:, -2] * high + self._factors[:, -1]


def _mix(words: Array, spare: Array) -> None:
    """`mix` in the place of the words, in uint32 lanes."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(words, np.uint32(shift), out=spare)
        words ^= spare
        words *= np.uint32(factor)
    np.right_shift(words, np.uint32(16), out=spare)
    words ^= spare


def _stream(key: int, count: int) -> Array:
    """So many words of 64 bits that look like chance to whoever lacks the key."""
    secret = key.to_bytes(8, "little")
    blocks = [
        blake2b(block.to_bytes(8, "little"), key=secret, person=_PURPOSE).digest()
        for block in range(-(-count // _WORDS))
    ]
    return np.frombuffer(b"".join(blocks), "<u8")[:count].astype(np.uint64)


@lru_cache(maxsize=64)
def _made(key: int, width: int) -> Race:
    return Race(GumbelWatermarkingConfig(key, width))


def race_of(settings: GumbelWatermarkingConfig) -> Race:
    """The race of some settings, the same object for the same key and width."""
    return _made(settings.key, settings.context_width)
