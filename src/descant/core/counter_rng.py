"""Chance without a state: random bits that depend on nothing but what they are keyed by."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WORD", "keyed", "mix", "uniform"]

WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche (the finaliser of MurmurHash3) in the low half of int64 lanes."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def keyed(seed: Tensor, slot: Tensor, position: Tensor) -> Tensor:
    """32 bits for each (seed, slot, position) [R], on the host as these are."""
    key = mix((seed & WORD) ^ mix(((seed >> 32) + 0x9E3779B9) & WORD))
    key = mix(key ^ mix((slot + 0x7F4A7C15) & WORD))
    return mix(key ^ mix((position + 0x94D049BB) & WORD))


def uniform(seed: Tensor, slot: Tensor, position: Tensor, salt: int) -> Tensor:
    """A number between 0 and 1, neither of them, for each (seed, slot, position, salt) [R], on the host."""
    bits = mix(mix((keyed(seed, slot, position) + salt * 0x9E3779B1) & WORD) ^ 0x6A09E667)
    return (bits.to(torch.float64) + 0.5) * 2.0**-32
