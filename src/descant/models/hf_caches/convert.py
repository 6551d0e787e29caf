"""What users may give as `past_key_values`, as one of our caches."""

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
    "of every layer (of an encoder-decoder model four tensors: its own, then the encoder's)"
)


def to_descant_cache(past: Any, attention_mask: Tensor | None = None) -> Cache | RecurrentCache:
    """One of our caches with what `past` holds, or `past` itself where it is one.

    The mask [R, L] of the positions read so far says which are padding at the left of rows: those are left
    out, so that rows begin with their first token. What is not ours is copied.
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
    """Tuples as transformers made them once."""
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
    """Keys and values of every layer, of which rows and positions agree."""
    found: list[KVPair] = []
    shapes = set()
    for key, value in pairs:
        for one in (key, value):
            if not isinstance(one, Tensor) or one.ndim != 4 or not one.is_floating_point():
                raise InputError("past_key_values", f"must be {_ACCEPTED_TYPES}", one)
            shapes.add((one.shape[0], one.shape[2]))
        found.append((key, value))
    if len(shapes) > 1:
        both = "must have as many rows and positions in every layer"
        raise InputError("past_key_values", both, sorted(shapes), "give what one forward returned")
    return found


def _fill_cache(
    face: _CacheT, pairs: Sequence[KVPair | None], mask: Tensor | None, length: int = 0
) -> _CacheT:
    """A cache with what layers hold of the latest of so many positions; what they have forgotten is zero."""
    length = max((length, *(pair[0].shape[2] for pair in pairs if pair is not None)))
    if mask is not None and length:
        if mask.ndim != 2 or mask.shape[1] < length:
            must = f"must say which of the {length} positions read are padding"
            raise InputError("attention_mask", must, mask)
        if not bool(mask[:, :length].all()):
            face.set_padding(mask[:, :length])
    stretched = [
        (None, None) if pair is None else tuple(_pad_left(one, length) for one in pair) for pair in pairs
    ]
    return face.write_layers(stretched)


def _pad_left(block: Tensor, length: int) -> Tensor:
    """Slots [R, H, S, D] with zeros before them up to that many."""
    short = length - block.shape[2]
    return torch.nn.functional.pad(block, (0, 0, short, 0)) if short else block


def _strip_left_padding(face: Cache, mask: Tensor | None) -> Cache:
    """A cache of ours whose rows begin with padding, as one of the same kind whose rows do not."""
    lengths = face.lengths
    length = face.get_seq_length()
    if mask is None or not length or bool(mask[:, :length].all()):
        return face
    if isinstance(face, EncoderDecoderCache):
        return EncoderDecoderCache(
            _strip_left_padding(face.self_attention_cache, mask), face.cross_attention_cache
        )
    if bool((lengths != length).any()):
        return face  # its rows were never padded
    pairs = list(face)
    if isinstance(face, HybridCache):
        # What has left a window is gone, so that nothing may be cut.
        return _fill_cache(
            type(face).from_shape(replace(face.cache_shape, max_rewind=0)), pairs, mask, length
        )
    if any(pair[0].shape[2] < length for pair in pairs):
        do = "tell it with `padded` before the first forward"
        raise InputError(
            "attention_mask", f"must not pad a {type(face).__name__} that has forgotten", mask, do
        )
    other = face.copy()
    other.reset()
    return _fill_cache(other, [(key[:, :, :length], value[:, :, :length]) for key, value in pairs], mask)


# -------------------------------------------------------------------- caches that transformers made
_DYNAMIC_LAYERS = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
_STATIC_LAYERS = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)


def _from_transformers_cache(past: cache_utils.Cache, mask: Tensor | None) -> Cache | RecurrentCache:
    """A cache of transformers 5: by what its layers are."""
    layers: list[Any] = list(past.layers)
    if any(isinstance(layer, cache_utils.BaseQuantizedLayer) for layer in layers):
        return _from_quantized_layers(layers, mask)
    if not all(type(layer) in (*_DYNAMIC_LAYERS, *_STATIC_LAYERS) for layer in layers):
        return _from_recurrent_cache(past)
    pairs, windows = [_layer_kv(layer) for layer in layers], [_layer_window(layer) for layer in layers]
    if any(window is not None for window in windows):
        limits = [layer.max_cache_len for layer in layers if type(layer) is cache_utils.StaticLayer]
        # What has left a window is gone, so that nothing may be cut.
        made = CacheShape(windows, max_cache_len=min(limits, default=None), max_rewind=0)
        read = max((int(layer.get_seq_length()) for layer in layers), default=0)
        return _fill_cache(HybridCache.from_shape(made), pairs, mask, read)
    if layers and all(type(layer) is cache_utils.StaticLayer for layer in layers):
        made = CacheShape(windows, max_cache_len=min(int(layer.max_cache_len) for layer in layers))
        return _fill_cache(StaticCache.from_shape(made), pairs, mask)
    return _fill_cache(OffloadedCache() if past.offloading else DynamicCache(), pairs, mask)


def _from_recurrent_cache(past: cache_utils.Cache) -> RecurrentCache:
    """Layers that keep more than keys and values, of which one says how much was read."""
    cache = RecurrentCache(past)
    if len(cache.lengths) and not cache.lengths.any():
        do = "feed a descant MambaCache, which counts, or the whole text"
        raise InputError("past_key_values", "must say how many tokens it has read", past, do)
    return cache.copy()


def _layer_kv(layer: Any) -> KVPair | None:
    """What a layer of transformers holds, oldest first."""
    if not layer.is_initialized or not int(layer.get_seq_length()):
        return None
    key, value, read = layer.keys, layer.values, int(layer.get_seq_length())
    if type(layer) in _STATIC_LAYERS:
        return key[:, :, : min(read, key.shape[2])], value[:, :, : min(read, key.shape[2])]
    return key, value


def _layer_window(layer: Any) -> int | None:
    if type(layer) is cache_utils.StaticSlidingWindowLayer:
        return int(layer.max_cache_len)
    return int(layer.sliding_window) if type(layer) is cache_utils.DynamicSlidingWindowLayer else None


def _from_quantized_layers(layers: Sequence[Any], mask: Tensor | None) -> Cache:
    """Quantised layers: the same settings, and what they hold made numbers again."""
    pairs, first = [_dequantize_layer(layer) for layer in layers], layers[0]
    kind = {
        cache_utils.QuantoQuantizedLayer: QuantoQuantizedCache,
        cache_utils.HQQQuantizedLayer: HQQQuantizedCache,
    }
    if type(first) not in kind:  # fp8, which we have not
        return _fill_cache(DynamicCache(), pairs, mask)
    config = QuantizedCacheConfig(
        nbits=first.nbits,
        axis_key=first.axis_key,
        axis_value=first.axis_value,
        q_group_size=first.q_group_size,
        residual_length=first.residual_length,
        compute_dtype=None,
    )
    return _fill_cache(kind[type(first)](config), pairs, mask)


def _dequantize_layer(layer: Any) -> KVPair | None:
    if not layer.is_initialized:
        return None
    key, value = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if hasattr(layer, "_apply_pending_reorder"):
        key, value = layer._apply_pending_reorder(key, value)
    if layer.keys is not None and layer.keys.numel():
        key, value = torch.cat((key, layer.keys), 2), torch.cat((value, layer.values), 2)
    return key, value
