"""Copies of transformers caches as Descant caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils

from descant.config.cache_config import QuantizedCacheConfig
from descant.errors import InputError
from descant.models.compat.hf_caches.base import Cache
from descant.models.compat.hf_caches.dynamic import (
    DynamicCache,
    HQQQuantizedCache,
    OffloadedCache,
    QuantoQuantizedCache,
)
from descant.models.compat.hf_caches.recurrent import RecurrentCache
from descant.models.compat.hf_caches.sized import CacheShape, HybridCache, StaticCache
from descant.models.forward.cache_layers import DYNAMIC_LAYERS, LAYERS_WITHOUT_KV, KVPair

__all__ = ["fill_cache", "from_transformers_cache"]

_CacheT = TypeVar("_CacheT", bound=Cache)

_STATIC_LAYERS = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)


def from_transformers_cache(past: cache_utils.Cache, mask: Tensor | None) -> Cache | RecurrentCache:
    """Convert a transformers 5 cache by the type of its layers."""
    layers: list[Any] = [layer for layer in past.layers if type(layer) not in LAYERS_WITHOUT_KV]
    if any(hasattr(layer, "_dequantize") for layer in layers):
        return _from_quantized_layers(layers, mask)
    if not all(type(layer) in (*DYNAMIC_LAYERS, *_STATIC_LAYERS) for layer in layers):
        return _from_recurrent_cache(past)
    pairs = [_layer_kv(layer) for layer in past.layers]
    windows = [_layer_window(layer) for layer in past.layers]
    if any(window is not None for window in windows):
        limits = [layer.max_cache_len for layer in layers if type(layer) is cache_utils.StaticLayer]
        # Positions that left a window are gone, so rows cannot be rewound.
        shape = CacheShape(windows, max_cache_len=min(limits, default=None), max_rewind=0)
        length = max((int(layer.get_seq_length()) for layer in layers), default=0)
        return fill_cache(HybridCache.from_shape(shape), pairs, mask, length)
    if layers and all(type(layer) is cache_utils.StaticLayer for layer in layers):
        shape = CacheShape(windows, max_cache_len=min(int(layer.max_cache_len) for layer in layers))
        return fill_cache(StaticCache.from_shape(shape), pairs, mask)
    return fill_cache(OffloadedCache() if past.offloading else DynamicCache(), pairs, mask)


def _from_recurrent_cache(past: cache_utils.Cache) -> RecurrentCache:
    """Convert a cache with recurrent layers; at least one layer must count its positions."""
    cache = RecurrentCache(past)
    if len(cache.lengths) and not cache.lengths.any():
        do = "use a descant MambaCache, which counts them, or feed the whole text"
        raise InputError("past_key_values", "must know how many tokens it has read", past, do)
    return cache.copy()


def _layer_kv(layer: Any) -> KVPair | None:
    """The keys and values of a transformers layer, oldest position first; None if it is empty."""
    if type(layer) in LAYERS_WITHOUT_KV or not layer.is_initialized or not int(layer.get_seq_length()):
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
        return fill_cache(DynamicCache(), pairs, mask)
    config = QuantizedCacheConfig(
        nbits=first.nbits,
        axis_key=first.axis_key,
        axis_value=first.axis_value,
        q_group_size=first.q_group_size,
        residual_length=first.residual_length,
        compute_dtype=None,
    )
    return fill_cache(classes[type(first)](config), pairs, mask)


def _dequantize_layer(layer: Any) -> KVPair | None:
    if not layer.is_initialized:
        return None
    key, value = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if hasattr(layer, "_apply_pending_reorder"):
        key, value = layer._apply_pending_reorder(key, value)
    if layer.keys is not None and layer.keys.numel():
        key, value = torch.cat((key, layer.keys), 2), torch.cat((value, layer.values), 2)
    return key, value


def fill_cache(
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
