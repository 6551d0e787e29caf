"""Counter-based random numbers: each depends on nothing but its key."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["UINT32_MASK", "counter_bits", "murmur_mix", "uniform"]

UINT32_MASK = 0xFFFFFFFF


def murmur_mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, in the low half of int64 elements."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & UINT32_MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & UINT32_MASK
    return x ^ (x >> 16)


def counter_bits(seed: Tensor, slot: Tensor, position: Tensor) -> Tensor:
    """32 bits for each (seed, slot, position) [R], all on the host."""
    key = murmur_mix((seed & UINT32_MASK) ^ murmur_mix(((seed >> 32) + 0x9E3779B9) & UINT32_MASK))
    key = murmur_mix(key ^ murmur_mix((slot + 0x7F4A7C15) & UINT32_MASK))
    return murmur_mix(key ^ murmur_mix((position + 0x94D049BB) & UINT32_MASK))


def uniform(seed: Tensor, slot: Tensor, position: Tensor, salt: int) -> Tensor:
    """A number in the open interval (0, 1) for each (seed, slot, position, salt) [R], on the host."""
    bits = murmur_mix(
        murmur_mix((counter_bits(seed, slot, position) + salt * 0x9E3779B1) & UINT32_MASK) ^ 0x6A09E667
    )
    return (bits.to(torch.float64) + 0.5) * 2.0**-32
