"""Conversion of everything accepted as `past_key_values` to a Descant cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils

from descant.errors import InputError
from descant.models.hf_caches.base import Cache
from descant.models.hf_caches.configs import QuantizedCacheConfig
from descant.models.hf_caches.dynamic import (
    DynamicCache,
    HQQQuantizedCache,
    OffloadedCache,
    QuantoQuantizedCache,
)
from descant.models.hf_caches.encoder_decoder import EncoderDecoderCache
from descant.models.hf_caches.layers import KVPair
from descant.models.hf_caches.recurrent import RecurrentCache
from descant.models.hf_caches.sized import CacheShape, HybridCache, StaticCache

__all__ = ["to_descant_cache"]

_CacheT = TypeVar("_CacheT", bound=Cache)

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
        return _from_transformers_cache(past, attention_mask)
    if isinstance(past, list | tuple):
        return _from_legacy_tuple(past, attention_mask)
    raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", past)


def _from_legacy_tuple(past: Sequence[Any], mask: Tensor | None) -> Cache:
    """Convert the tuples of transformers 4."""
    sizes = {len(pair) if isinstance(pair, list | tuple) else 0 for pair in past}
    if sizes not in ({2}, {4}):
        raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", past)
    own = _fill_cache(DynamicCache(), _validate_layers([pair[:2] for pair in past]), mask)
    if sizes == {2}:
        return own
    return EncoderDecoderCache(
        own, _fill_cache(DynamicCache(), _validate_layers([pair[2:] for pair in past]), None)
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


def _fill_cache(
    cache: _CacheT, pairs: Sequence[KVPair | None], mask: Tensor | None, length: int = 0
) -> _CacheT:
    """Write layers that hold the last of `length` positions; dropped positions are filled with zeros."""
    length = max((length, *(pair[0].shape[2] for pair in pairs if pair is not None)))
    if mask is not None and length:
        if mask.ndim != 2 or mask.shape[1] < length:
            must = f"must cover the {length} positions read"
            raise InputError("attention_mask", must, mask)
        if not bool(mask[:, :length].all()):
            cache.set_padding(mask[:, :length])
    return cache.write_layers(
        [
            (None, None) if pair is None else tuple(_pad_left(block, length) for block in pair)
            for pair in pairs
        ]
    )


def _pad_left(block: Tensor, length: int) -> Tensor:
    """A block [R, H, S, D] left-padded with zeros to `length` slots."""
    missing = length - block.shape[2]
    return torch.nn.functional.pad(block, (0, 0, missing, 0)) if missing else block


def _strip_left_padding(cache: Cache, mask: Tensor | None) -> Cache:
    """A cache of the same class without the left padding that `mask` marks."""
    lengths = cache.lengths
    length = cache.get_seq_length()
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
        return _fill_cache(type(cache).from_shape(shape), pairs, mask, length)
    if any(pair[0].shape[2] < length for pair in pairs):
        must = f"must have no padding for a {type(cache).__name__} that has dropped positions"
        raise InputError("attention_mask", must, mask, "call `set_padding` before the first forward")
    other = cache.copy()
    other.reset()
    return _fill_cache(other, [(key[:, :, :length], value[:, :, :length]) for key, value in pairs], mask)


# -------------------------------------------------------------------- caches of transformers
_DYNAMIC_LAYERS = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
_STATIC_LAYERS = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)


def _from_transformers_cache(past: cache_utils.Cache, mask: Tensor | None) -> Cache | RecurrentCache:
    """Convert a transformers 5 cache by the type of its layers."""
    layers: list[Any] = list(past.layers)
    if any(isinstance(layer, cache_utils.BaseQuantizedLayer) for layer in layers):
        return _from_quantized_layers(layers, mask)
    if not all(type(layer) in (*_DYNAMIC_LAYERS, *_STATIC_LAYERS) for layer in layers):
        return _from_recurrent_cache(past)
    pairs, windows = [_layer_kv(layer) for layer in layers], [_layer_window(layer) for layer in layers]
    if any(window is not None for window in windows):
        limits = [layer.max_cache_len for layer in layers if type(layer) is cache_utils.StaticLayer]
        # Positions that left a window are gone, so rows cannot be rewound.
        shape = CacheShape(windows, max_cache_len=min(limits, default=None), max_rewind=0)
        length = max((int(layer.get_seq_length()) for layer in layers), default=0)
        return _fill_cache(HybridCache.from_shape(shape), pairs, mask, length)
    if layers and all(type(layer) is cache_utils.StaticLayer for layer in layers):
        shape = CacheShape(windows, max_cache_len=min(int(layer.max_cache_len) for layer in layers))
        return _fill_cache(StaticCache.from_shape(shape), pairs, mask)
    return _fill_cache(OffloadedCache() if past.offloading else DynamicCache(), pairs, mask)


def _from_recurrent_cache(past: cache_utils.Cache) -> RecurrentCache:
    """Convert a cache with recurrent layers; at least one layer must count its positions."""
    cache = RecurrentCache(past)
    if len(cache.lengths) and not cache.lengths.any():
        do = "use a descant MambaCache, which counts them, or feed the whole text"
        raise InputError("past_key_values", "must know how many tokens it has read", past, do)
    return cache.copy()


def _layer_kv(layer: Any) -> KVPair | None:
    """The keys and values of a transformers layer, oldest position first; None if it is empty."""
    if not layer.is_initialized or not int(layer.get_seq_length()):
        return None
    key, value = layer.keys, layer.values
    if type(layer) in _STATIC_LAYERS:
        size = min(int(layer.get_seq_length()), key.shape[2])
        return key[:, :, :size], value[:, :, :size]
    return key, value


def _layer_window(layer: Any) -> int | None:
    if type(layer) is cache_utils.StaticSlidingWindowLayer:
        return int(layer.max_cache_len)
    return int(layer.sliding_window) if type(layer) is cache_utils.DynamicSlidingWindowLayer else None


def _from_quantized_layers(layers: Sequence[Any], mask: Tensor | None) -> Cache:
    """Dequantize the layers and quantize them again with the same settings."""
    pairs, first = [_dequantize_layer(layer) for layer in layers], layers[0]
    classes = {
        cache_utils.QuantoQuantizedLayer: QuantoQuantizedCache,
        cache_utils.HQQQuantizedLayer: HQQQuantizedCache,
    }
    if type(first) not in classes:  # fp8 is not supported
        return _fill_cache(DynamicCache(), pairs, mask)
    config = QuantizedCacheConfig(
        nbits=first.nbits,
        axis_key=first.axis_key,
        axis_value=first.axis_value,
        q_group_size=first.q_group_size,
        residual_length=first.residual_length,
        compute_dtype=None,
    )
    return _fill_cache(classes[type(first)](config), pairs, mask)


def _dequantize_layer(layer: Any) -> KVPair | None:
    if not layer.is_initialized:
        return None
    key, value = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if hasattr(layer, "_apply_pending_reorder"):
        key, value = layer._apply_pending_reorder(key, value)
    if layer.keys is not None and layer.keys.numel():
        key, value = torch.cat((key, layer.keys), 2), torch.cat((value, layer.values), 2)
    return key, value
