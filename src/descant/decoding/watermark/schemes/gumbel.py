"""The race: uniform numbers that hang on a key, a nonce, a context and a token, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from descant.core.counter_rng import UINT32_MASK, murmur_mix
from descant.decoding.watermark.schemes.config import GumbelWatermarkingConfig

__all__ = ["KeyedUniforms", "get_keyed_uniforms"]

Array = np.ndarray[Any, np.dtype[Any]]

_WORDS_PER_DIGEST: Final = 8  # of 64 bits, in a digest
_PERSONALIZATION: Final = b"descant race"
_GOLDEN_RATIO: Final = 0x9E3779B1


class KeyedUniforms:
    """The keyed uniforms: the smaller that of a token, the better its place in the race.

    A context and a nonce become two words by multilinear hashing with secret factors (Lemire and Kaser 2014,
    "Strongly universal string hashing is fast"): two of them share both words with a chance of 2**-63. The
    words then shuffle the 2**32 values that secretly stand for tokens. Integers decide, so every device
    agrees. It is thorough mixing and no cipher: who sees very many marked tokens of known chances might
    learn something of the key.
    """

    def __init__(self, settings: GumbelWatermarkingConfig) -> None:
        self.context_size = settings.context_width
        secret = _key_stream(settings.key, 2 * (self.context_size + 4))
        self._token_keys = [int(one) & UINT32_MASK for one in secret[:2].tolist()]
        self._hash_factors = secret[2:].reshape(2, -1)  # [2, W + 3]: the tokens', the nonce's two, a constant
        self._device_tensors: dict[
            tuple[str, int], Tensor
        ] = {}  # what a device wants again: factors, or words by size

    def context_states(self, contexts: Tensor, nonce: Tensor | int) -> Tensor:
        """The two words of each context [N, W] under a nonce, or each its own below 2**32 [N, 1]: [N, 2]."""
        factors = self._device_factors(contexts.device)
        sums = (contexts[:, None] * factors[:, : self.context_size]).sum(-1)  # int64 wraps around everywhere
        if isinstance(nonce, Tensor):
            sums = sums + nonce * factors[:, -3] + factors[:, -1]
        else:
            shift = torch.from_numpy(self._nonce_offset(nonce).view(np.int64))
            sums = sums + shift.to(contexts.device, non_blocking=True)
        return (sums >> 32) & UINT32_MASK

    def context_states_on_host(self, contexts: Array, nonce: int) -> Array:
        """The same on the host, in uint32 lanes."""
        sums = contexts.astype(np.uint64) @ self._hash_factors[:, : self.context_size].T + self._nonce_offset(
            nonce
        )
        return (sums >> np.uint64(32)).astype(np.uint32)

    def vocab_uniforms(self, states: Tensor, vocabulary: int) -> Tensor:
        """The uniforms of all tokens in float32 [N, V]: never 0, exact near it, and at most 1."""
        signs = self._token_words(states.device, vocabulary)
        bits = murmur_mix(((signs ^ states[:, :1]) * (states[:, 1:] | 1)) & UINT32_MASK)
        return bits.float().add_(0.5).mul_(2.0**-32)

    def iter_vocab_uniforms(self, words: Array, vocabulary: int) -> Iterator[Array]:
        """The same on the host, line by line [V], each in the place of the one before.

        In lanes half as wide a line stays in the nearest cache, which makes it ten times as fast.
        """
        signs = self._token_words(torch.device("cpu"), vocabulary).numpy().astype(np.uint32)
        line, spare, even = np.empty_like(signs), np.empty_like(signs), np.empty(vocabulary, np.float32)
        for first, second in words:
            np.bitwise_xor(signs, first, out=line)
            line *= second | np.uint32(1)
            _mix_inplace(line, spare)
            np.add(line, np.float32(0.5), out=even, casting="unsafe", dtype=np.float32)
            even *= np.float32(2.0**-32)
            yield even

    def token_uniforms(self, words: Array, tokens: Array) -> Array:
        """The uniforms of one token [M] in each state [M, 2], never 0 nor 1, in float64 [M]."""
        bits = tokens.astype(np.uint32) * np.uint32(_GOLDEN_RATIO) + np.uint32(self._token_keys[0])
        spare = np.empty_like(bits)
        _mix_inplace(bits, spare)
        bits ^= np.uint32(self._token_keys[1])
        _mix_inplace(bits, spare)
        bits ^= words[:, 0]
        bits *= words[:, 1] | np.uint32(1)
        _mix_inplace(bits, spare)
        return (bits + 0.5) * 2.0**-32

    def _token_words(self, device: torch.device, vocabulary: int) -> Tensor:
        """A secret word for each token, no two of them alike [V]."""
        place = (str(device), vocabulary)
        if place not in self._device_tensors:
            first, second = self._token_keys
            counted = (torch.arange(vocabulary) * _GOLDEN_RATIO + first) & UINT32_MASK
            self._device_tensors[place] = murmur_mix(murmur_mix(counted) ^ second).to(device)
        return self._device_tensors[place]

    def _device_factors(self, device: torch.device) -> Tensor:
        place = (str(device), 0)
        if place not in self._device_tensors:
            self._device_tensors[place] = torch.from_numpy(self._hash_factors.view(np.int64)).to(device)
        return self._device_tensors[place]

    def _nonce_offset(self, nonce: int) -> Array:
        """What a nonce adds to the sums [2]."""
        low, high = np.uint64(nonce & UINT32_MASK), np.uint64(nonce >> 32)
        return self._hash_factors[:, -3] * low + self._hash_factors[:, -2] * high + self._hash_factors[:, -1]


def _mix_inplace(words: Array, spare: Array) -> None:
    """`mix` in the place of the words, in uint32 lanes."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(words, np.uint32(shift), out=spare)
        words ^= spare
        words *= np.uint32(factor)
    np.right_shift(words, np.uint32(16), out=spare)
    words ^= spare


def _key_stream(key: int, count: int) -> Array:
    """So many words of 64 bits that look like chance to whoever lacks the key."""
    secret = key.to_bytes(8, "little")
    blocks = [
        blake2b(block.to_bytes(8, "little"), key=secret, person=_PERSONALIZATION).digest()
        for block in range(-(-count // _WORDS_PER_DIGEST))
    ]
    return np.frombuffer(b"".join(blocks), "<u8")[:count].astype(np.uint64)


@lru_cache(maxsize=64)
def _cached_uniforms(key: int, width: int) -> KeyedUniforms:
    return KeyedUniforms(GumbelWatermarkingConfig(key, width))


def get_keyed_uniforms(settings: GumbelWatermarkingConfig) -> KeyedUniforms:
    """The race of some settings, the same object for the same key and width."""
    return _cached_uniforms(settings.key, settings.context_width)
