"""Conversion of everything accepted as `past_key_values` to a Descant cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import cache_utils

from descant.errors import InputError
from descant.models.compat.hf_caches.base import Cache
from descant.models.compat.hf_caches.dynamic import DynamicCache
from descant.models.compat.hf_caches.encoder_decoder import EncoderDecoderCache
from descant.models.compat.hf_caches.recurrent import RecurrentCache
from descant.models.compat.hf_caches.sized import HybridCache
from descant.models.compat.hf_caches.transformers_copy import fill_cache, from_transformers_cache
from descant.models.forward.cache_layers import KVPair

__all__ = ["to_descant_cache"]

_ACCEPTED_TYPES = (
    "a cache of descant or of transformers, or a tuple with keys and values [rows, heads, positions, size] "
    "of every layer (four tensors for encoder-decoder models: self-attention, then cross-attention)"
)


def to_descant_cache(past: Any, attention_mask: Tensor | None = None) -> Cache | RecurrentCache:
    """Convert `past` to a Descant cache; a Descant cache is returned unchanged if it has no left padding.

    `attention_mask` [R, L] marks the left padding of the positions read so far. Padding is removed, so that
    every row starts with its first token. The contents of other caches are copied.
    """
    if isinstance(past, RecurrentCache):
        return past
    if isinstance(past, Cache):
        return _strip_left_padding(past, attention_mask)
    if isinstance(past, cache_utils.EncoderDecoderCache):
        own = to_descant_cache(past.self_attention_cache, attention_mask)
        return EncoderDecoderCache(own, to_descant_cache(past.cross_attention_cache))
    if isinstance(past, cache_utils.Cache):
        return from_transformers_cache(past, attention_mask)
    if isinstance(past, list | tuple):
        return _from_legacy_tuple(past, attention_mask)
    raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", past)


def _from_legacy_tuple(past: Sequence[Any], mask: Tensor | None) -> Cache:
    """Convert the tuples of transformers 4."""
    sizes = {len(pair) if isinstance(pair, list | tuple) else 0 for pair in past}
    if sizes not in ({2}, {4}):
        raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", past)
    own = fill_cache(DynamicCache(), _validate_layers([pair[:2] for pair in past]), mask)
    if sizes == {2}:
        return own
    return EncoderDecoderCache(
        own, fill_cache(DynamicCache(), _validate_layers([pair[2:] for pair in past]), None)
    )


def _validate_layers(pairs: Sequence[Sequence[Any]]) -> list[KVPair]:
    """Check that all layers have the same number of rows and positions."""
    layers: list[KVPair] = []
    shapes = set()
    for key, value in pairs:
        for block in (key, value):
            if not isinstance(block, Tensor) or block.ndim != 4 or not block.is_floating_point():
                raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", block)
            shapes.add((block.shape[0], block.shape[2]))
        layers.append((key, value))
    if len(shapes) > 1:
        must = "must have the same number of rows and positions in every layer"
        raise InputError("past_key_values", must, sorted(shapes), "pass what one forward returned")
    return layers


def _strip_left_padding(cache: Cache, mask: Tensor | None) -> Cache:
    """A cache of the same class without the left padding that `mask` marks."""
    lengths = cache.lengths
    length = cache.seen_tokens
    if mask is None or not length or bool(mask[:, :length].all()):
        return cache
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(
            _strip_left_padding(cache.self_attention_cache, mask), cache.cross_attention_cache
        )
    if bool((lengths != length).any()):
        return cache  # its rows were never padded
    pairs = list(cache)
    if isinstance(cache, HybridCache):
        # Positions that left a window are gone, so rows cannot be rewound.
        shape = replace(cache.cache_shape, max_rewind=0)
        return fill_cache(type(cache).from_shape(shape), pairs, mask, length)
    if any(pair[0].shape[2] < length for pair in pairs):
        must = f"must have no padding for a {type(cache).__name__} that has dropped positions"
        raise InputError("attention_mask", must, mask, "call `set_padding` before the first forward")
    other = cache.copy()
    other.reset()
    return fill_cache(other, [(key[:, :, :length], value[:, :, :length]) for key, value in pairs], mask)
