"""What users may give as `past_key_values`, as one of our caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils as theirs

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
from descant.models.hf_caches.layers import Pair
from descant.models.hf_caches.recurrent import OwnCache
from descant.models.hf_caches.sized import HybridCache, Made, StaticCache

__all__ = ["accepted"]

_Face = TypeVar("_Face", bound=Cache)

_KINDS = (
    "a cache of descant or of transformers, or a tuple with keys and values [rows, heads, positions, size] "
    "of every layer (of an encoder-decoder model four tensors: its own, then the encoder's)"
)


def accepted(past: Any, attention_mask: Tensor | None = None) -> Cache | OwnCache:
    """One of our caches with what `past` holds, or `past` itself where it is one.

    The mask [R, L] of the positions read so far says which are padding at the left of rows: those are left
    out, so that rows begin with their first token. What is not ours is copied.
    """
    if isinstance(past, OwnCache):
        return past
    if isinstance(past, Cache):
        return _unpadded(past, attention_mask)
    if isinstance(past, theirs.EncoderDecoderCache):
        own = accepted(past.self_attention_cache, attention_mask)
        return EncoderDecoderCache(own, accepted(past.cross_attention_cache))
    if isinstance(past, theirs.Cache):
        return _of_transformers(past, attention_mask)
    if isinstance(past, list | tuple):
        return _of_tuple(past, attention_mask)
    raise InputError("past_key_values", f"must be {_KINDS}", past)


def _of_tuple(past: Sequence[Any], mask: Tensor | None) -> Cache:
    """Tuples as transformers made them once."""
    sizes = {len(pair) if isinstance(pair, list | tuple) else 0 for pair in past}
    if sizes not in ({2}, {4}):
        raise InputError("past_key_values", f"must be {_KINDS}", past)
    own = _filled(DynamicCache(), _checked([pair[:2] for pair in past]), mask)
    if sizes == {2}:
        return own
    return EncoderDecoderCache(own, _filled(DynamicCache(), _checked([pair[2:] for pair in past]), None))


def _checked(pairs: Sequence[Sequence[Any]]) -> list[Pair]:
    """Keys and values of every layer, of which rows and positions agree."""
    found: list[Pair] = []
    shapes = set()
    for key, value in pairs:
        for one in (key, value):
            if not isinstance(one, Tensor) or one.ndim != 4 or not one.is_floating_point():
                raise InputError("past_key_values", f"must be {_KINDS}", one)
            shapes.add((one.shape[0], one.shape[2]))
        found.append((key, value))
    if len(shapes) > 1:
        both = "must have as many rows and positions in every layer"
        raise InputError("past_key_values", both, sorted(shapes), "give what one forward returned")
    return found


def _filled(face: _Face, pairs: Sequence[Pair | None], mask: Tensor | None, length: int = 0) -> _Face:
    """A cache with what layers hold of the latest of so many positions; what they have forgotten is zero."""
    length = max((length, *(pair[0].shape[2] for pair in pairs if pair is not None)))
    if mask is not None and length:
        if mask.ndim != 2 or mask.shape[1] < length:
            must = f"must say which of the {length} positions read are padding"
            raise InputError("attention_mask", must, mask)
        if not bool(mask[:, :length].all()):
            face.padded(mask[:, :length])
    stretched = [
        (None, None) if pair is None else tuple(_stretched(one, length) for one in pair) for pair in pairs
    ]
    return face.fill(stretched)


def _stretched(block: Tensor, length: int) -> Tensor:
    """Slots [R, H, S, D] with zeros before them up to that many."""
    short = length - block.shape[2]
    return torch.nn.functional.pad(block, (0, 0, short, 0)) if short else block


def _unpadded(face: Cache, mask: Tensor | None) -> Cache:
    """A cache of ours whose rows begin with padding, as one of the same kind whose rows do not."""
    lengths = face.lengths
    length = face.get_seq_length()
    if mask is None or not length or bool(mask[:, :length].all()):
        return face
    if isinstance(face, EncoderDecoderCache):
        return EncoderDecoderCache(_unpadded(face.self_attention_cache, mask), face.cross_attention_cache)
    if bool((lengths != length).any()):
        return face  # its rows were never padded
    pairs = list(face)
    if isinstance(face, HybridCache):
        # What has left a window is gone, so that nothing may be cut.
        return _filled(type(face).of(replace(face.made, slack=0)), pairs, mask, length)
    if any(pair[0].shape[2] < length for pair in pairs):
        do = "tell it with `padded` before the first forward"
        raise InputError(
            "attention_mask", f"must not pad a {type(face).__name__} that has forgotten", mask, do
        )
    other = face.copy()
    other.reset()
    return _filled(other, [(key[:, :, :length], value[:, :, :length]) for key, value in pairs], mask)


# -------------------------------------------------------------------- caches that transformers made
_GROWING = (theirs.DynamicLayer, theirs.DynamicSlidingWindowLayer)
_FIXED = (theirs.StaticLayer, theirs.StaticSlidingWindowLayer)


def _of_transformers(past: theirs.Cache, mask: Tensor | None) -> Cache | OwnCache:
    """A cache of transformers 5: by what its layers are."""
    layers: list[Any] = list(past.layers)
    if any(isinstance(layer, theirs.BaseQuantizedLayer) for layer in layers):
        return _of_quantized(layers, mask)
    if not all(type(layer) in (*_GROWING, *_FIXED) for layer in layers):
        return _of_state(past)
    pairs, windows = [_held(layer) for layer in layers], [_window(layer) for layer in layers]
    if any(window is not None for window in windows):
        limits = [layer.max_cache_len for layer in layers if type(layer) is theirs.StaticLayer]
        # What has left a window is gone, so that nothing may be cut.
        made = Made(windows, positions=min(limits, default=None), slack=0)
        read = max((int(layer.get_seq_length()) for layer in layers), default=0)
        return _filled(HybridCache.of(made), pairs, mask, read)
    if layers and all(type(layer) is theirs.StaticLayer for layer in layers):
        made = Made(windows, positions=min(int(layer.max_cache_len) for layer in layers))
        return _filled(StaticCache.of(made), pairs, mask)
    return _filled(OffloadedCache() if past.offloading else DynamicCache(), pairs, mask)


def _of_state(past: theirs.Cache) -> OwnCache:
    """Layers that keep more than keys and values, of which one says how much was read."""
    cache = OwnCache(past)
    if len(cache.lengths) and not cache.lengths.any():
        do = "feed a descant MambaCache, which counts, or the whole text"
        raise InputError("past_key_values", "must say how many tokens it has read", past, do)
    return cache.copy()


def _held(layer: Any) -> Pair | None:
    """What a layer of transformers holds, oldest first."""
    if not layer.is_initialized or not int(layer.get_seq_length()):
        return None
    key, value, read = layer.keys, layer.values, int(layer.get_seq_length())
    if type(layer) in _FIXED:
        return key[:, :, : min(read, key.shape[2])], value[:, :, : min(read, key.shape[2])]
    return key, value


def _window(layer: Any) -> int | None:
    if type(layer) is theirs.StaticSlidingWindowLayer:
        return int(layer.max_cache_len)
    return int(layer.sliding_window) if type(layer) is theirs.DynamicSlidingWindowLayer else None


def _of_quantized(layers: Sequence[Any], mask: Tensor | None) -> Cache:
    """Quantised layers: the same settings, and what they hold made numbers again."""
    pairs, first = [_dequantized(layer) for layer in layers], layers[0]
    kind = {theirs.QuantoQuantizedLayer: QuantoQuantizedCache, theirs.HQQQuantizedLayer: HQQQuantizedCache}
    if type(first) not in kind:  # fp8, which we have not
        return _filled(DynamicCache(), pairs, mask)
    config = QuantizedCacheConfig(
        nbits=first.nbits,
        axis_key=first.axis_key,
        axis_value=first.axis_value,
        q_group_size=first.q_group_size,
        residual_length=first.residual_length,
        compute_dtype=None,
    )
    return _filled(kind[type(first)](config), pairs, mask)


def _dequantized(layer: Any) -> Pair | None:
    if not layer.is_initialized:
        return None
    key, value = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if hasattr(layer, "_apply_pending_reorder"):
        key, value = layer._apply_pending_reorder(key, value)
    if layer.keys is not None and layer.keys.numel():
        key, value = torch.cat((key, layer.keys), 2), torch.cat((value, layer.values), 2)
    return key, value
