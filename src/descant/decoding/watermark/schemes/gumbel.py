"""Keyed uniforms of the Gumbel watermark: a function of key, nonce, context and token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from descant.config.watermarking_config import GumbelWatermarkingConfig
from descant.core.counter_rng import UINT32_MASK, murmur_mix
from descant.core.interfaces import Array

__all__ = ["KeyedUniforms", "get_keyed_uniforms"]


_WORDS_PER_DIGEST: Final = 8  # 64-bit words per digest
_PERSONALIZATION: Final = b"descant race"
_GOLDEN_RATIO: Final = 0x9E3779B1


class KeyedUniforms:
    """Keyed uniform numbers; the token with the smallest -log(1 - u) / p wins the draw.

    A context and a nonce are hashed to two words by multilinear hashing with secret factors (Lemire and Kaser
    2014, "Strongly universal string hashing is fast"): two inputs collide with probability 2**-63. The words
    then permute the 2**32 values assigned secretly to tokens. All operations are on integers, so every device
    agrees. This is mixing, not encryption: an observer of very many marked tokens with known probabilities
    might learn something about the key.
    """

    def __init__(self, settings: GumbelWatermarkingConfig) -> None:
        self.context_size = settings.context_width
        secret = _key_stream(settings.key, 2 * (self.context_size + 4))
        self._token_keys = [int(word) & UINT32_MASK for word in secret[:2].tolist()]
        self._hash_factors = secret[2:].reshape(2, -1)  # [2, W + 3]: tokens, two for the nonce, a constant
        # Cached per device: hash factors under size 0, token words under the vocabulary size.
        self._device_tensors: dict[tuple[str, int], Tensor] = {}

    def context_states(self, contexts: Tensor, nonce: Tensor | int) -> Tensor:
        """Two words per context [N, W], for one nonce or one below 2**32 per row [N, 1]: [N, 2]."""
        factors = self._device_factors(contexts.device)
        sums = (contexts[:, None] * factors[:, : self.context_size]).sum(-1)  # int64 wraps on every device
        if isinstance(nonce, Tensor):
            sums = sums + nonce * factors[:, -3] + factors[:, -1]
        else:
            offset = torch.from_numpy(self._nonce_offset(nonce).view(np.int64))
            sums = sums + offset.to(contexts.device, non_blocking=True)
        return (sums >> 32) & UINT32_MASK

    def context_states_on_host(self, contexts: Array, nonce: int) -> Array:
        """The same on the host, as uint32."""
        sums = contexts.astype(np.uint64) @ self._hash_factors[:, : self.context_size].T + self._nonce_offset(
            nonce
        )
        return (sums >> np.uint64(32)).astype(np.uint32)

    def vocab_uniforms(self, states: Tensor, vocab_size: int) -> Tensor:
        """Uniforms of all tokens as float32 [N, V], in (0, 1]; exact near 0."""
        token_words = self._token_words(states.device, vocab_size)
        bits = murmur_mix(((token_words ^ states[:, :1]) * (states[:, 1:] | 1)) & UINT32_MASK)
        return bits.float().add_(0.5).mul_(2.0**-32)

    def iter_vocab_uniforms(self, states: Array, vocab_size: int) -> Iterator[Array]:
        """The same on the host, yielded row by row [V] in one reused buffer.

        As uint32 a row stays in the L1 cache, which is ten times as fast.
        """
        token_words = self._token_words(torch.device("cpu"), vocab_size).numpy().astype(np.uint32)
        bits, spare, uniforms = (
            np.empty_like(token_words),
            np.empty_like(token_words),
            np.empty(vocab_size, np.float32),
        )
        for first, second in states:
            np.bitwise_xor(token_words, first, out=bits)
            bits *= second | np.uint32(1)
            _mix_inplace(bits, spare)
            np.add(bits, np.float32(0.5), out=uniforms, casting="unsafe", dtype=np.float32)
            uniforms *= np.float32(2.0**-32)
            yield uniforms

    def token_uniforms(self, states: Array, tokens: Array) -> Array:
        """Uniforms of one token [M] per state [M, 2], as float64 in (0, 1) [M]."""
        bits = tokens.astype(np.uint32) * np.uint32(_GOLDEN_RATIO) + np.uint32(self._token_keys[0])
        spare = np.empty_like(bits)
        _mix_inplace(bits, spare)
        bits ^= np.uint32(self._token_keys[1])
        _mix_inplace(bits, spare)
        bits ^= states[:, 0]
        bits *= states[:, 1] | np.uint32(1)
        _mix_inplace(bits, spare)
        return (bits + 0.5) * 2.0**-32

    def _token_words(self, device: torch.device, vocab_size: int) -> Tensor:
        """A distinct secret word per token [V]."""
        key = (str(device), vocab_size)
        if key not in self._device_tensors:
            first, second = self._token_keys
            sequence = (torch.arange(vocab_size) * _GOLDEN_RATIO + first) & UINT32_MASK
            self._device_tensors[key] = murmur_mix(murmur_mix(sequence) ^ second).to(device)
        return self._device_tensors[key]

    def _device_factors(self, device: torch.device) -> Tensor:
        key = (str(device), 0)
        if key not in self._device_tensors:
            self._device_tensors[key] = torch.from_numpy(self._hash_factors.view(np.int64)).to(device)
        return self._device_tensors[key]

    def _nonce_offset(self, nonce: int) -> Array:
        """Contribution of a nonce to the hash sums [2]."""
        low, high = np.uint64(nonce & UINT32_MASK), np.uint64(nonce >> 32)
        return self._hash_factors[:, -3] * low + self._hash_factors[:, -2] * high + self._hash_factors[:, -1]


def _mix_inplace(words: Array, spare: Array) -> None:
    """`murmur_mix` in place, on uint32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(words, np.uint32(shift), out=spare)
        words ^= spare
        words *= np.uint32(factor)
    np.right_shift(words, np.uint32(16), out=spare)
    words ^= spare


def _key_stream(key: int, count: int) -> Array:
    """Pseudorandom 64-bit words derived from the key."""
    secret = key.to_bytes(8, "little")
    blocks = [
        blake2b(block.to_bytes(8, "little"), key=secret, person=_PERSONALIZATION).digest()
        for block in range(-(-count // _WORDS_PER_DIGEST))
    ]
    return np.frombuffer(b"".join(blocks), "<u8")[:count].astype(np.uint64)


@lru_cache(maxsize=64)
def _cached_uniforms(key: int, context_width: int) -> KeyedUniforms:
    return KeyedUniforms(GumbelWatermarkingConfig(key, context_width))


def get_keyed_uniforms(settings: GumbelWatermarkingConfig) -> KeyedUniforms:
    """Return the cached uniforms of the settings, one object per key and width."""
    return _cached_uniforms(settings.key, settings.context_width)
