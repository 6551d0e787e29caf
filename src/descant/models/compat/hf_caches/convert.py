"""Copies of transformers caches as Descant caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from descant.config.cache_config import QuantizedCacheConfig
from descant.core.interfaces import KVCache
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

_CacheT = TypeVar("_CacheT", bound=Cache)

_STATIC_LAYERS = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)


def from_transformers_cache(past: cache_utils.Cache, mask: Tensor | None) -> Cache | RecurrentCache:
    """Convert a transformers 5 cache by the type of its layers."""
    layers: list[Any] = [layer for layer in past.layers if type(layer) not in LAYERS_WITHOUT_KV]
    if any(hasattr(layer, "_dequantize") for layer in layers):
        return _from_quantized_layers(layers, mask)
    if not all(type(layer) in (*DYNAMIC_LAYERS, *_STATIC_LAYERS) for layer in layers):
        # Convert a cache with recurrent layers; at least one layer must count its positions.
        cache = RecurrentCache(past)
        if len(cache.lengths) and not cache.lengths.any():
            do = "use a descant MambaCache, which counts them, or feed the whole text"
            raise InputError("past_key_values", "must know how many tokens it has read", past, do)
        return cache.copy()
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
            raise InputError("attention_mask", f"must cover the {length} positions read", mask)
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


class EncoderDecoderCache(Cache, TransformersEncoderDecoderCache):
    """A self-attention cache and a cross-attention cache.

    The contents of a cache of transformers are copied to a Descant cache; forwards write to the copy, which
    `self_attention_cache` and `cross_attention_cache` return.
    """

    def __init__(self, self_attention_cache: Any, cross_attention_cache: Any = None) -> None:
        if cross_attention_cache is None:  # the layers of such a cache, four tensors each
            pairs = [tuple(pair) for pair in self_attention_cache]
            half = [len(pair) // 2 for pair in pairs]
            self_attention_cache = DynamicCache([pair[:n] for pair, n in zip(pairs, half, strict=True)])
            cross_attention_cache = DynamicCache([pair[n:] for pair, n in zip(pairs, half, strict=True)])
        self.self_attention_cache: Cache = _own_cache("self_attention_cache", self_attention_cache)  # type: ignore[assignment]
        self.cross_attention_cache: Cache = _own_cache("cross_attention_cache", cross_attention_cache)  # type: ignore[assignment]
        self.offloading = False
        self.layer_class_to_replicate = None
        cross = self.cross_attention_cache
        self.is_updated = {layer: cross.get_seq_length(layer) > 0 for layer in range(len(cross))}

    def set_cross_attention(self, pairs: Sequence[KVPair]) -> None:
        """Replace the cross-attention layers [R, H, S, D]."""
        self.cross_attention_cache.reset()
        self.cross_attention_cache.write_layers(pairs)
        self.is_updated = dict.fromkeys(range(len(pairs)), True)

    @property
    def _store(self) -> KVCache:  # type: ignore[override]
        return self.self_attention_cache._store

    @property
    def read_only(self) -> bool:
        """Whether writes raise an error."""
        return self.self_attention_cache.read_only

    @read_only.setter
    def read_only(self, read_only: bool) -> None:
        for part in (self.self_attention_cache, self.cross_attention_cache):
            part.read_only = read_only

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *given: Any, **more: Any
    ) -> KVPair:
        """Write to the self-attention cache."""
        return self.self_attention_cache.update(key_states, value_states, layer_idx, *given, **more)

    def _select_rows(self, rows: Tensor) -> None:
        for part in (self.self_attention_cache, self.cross_attention_cache):
            part._select_rows(rows)

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Declare the left padding of the first decoder forward by its mask [R, T]."""
        self.self_attention_cache.set_padding(attention_mask)
        return self

    def crop(  # type: ignore[override]  # the documented name
        self, maximum_length: int | None = None, *, max_length: int | None = None
    ) -> None:
        """Truncate the self-attention cache; the cross-attention cache is not changed.

        `maximum_length` is the documented name here, `max_length` that of the other caches.
        """
        given = [length for length in (maximum_length, max_length) if length is not None]
        if len(given) != 1:
            raise InputError("maximum_length", "must be given once", given)
        self.self_attention_cache.crop(given[0])

    def reset(self) -> None:
        """Remove every row from both caches."""
        for part in (self.self_attention_cache, self.cross_attention_cache):
            part.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def _copy_rows(self, rows: Tensor) -> Self:
        return type(self)(
            self.self_attention_cache._copy_rows(rows), self.cross_attention_cache._copy_rows(rows)
        )

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """A new cache with the rows of several; the inputs are not changed."""
        if not splits:
            raise InputError("splits", "must contain at least one cache", splits)
        own, cross = zip(
            *((part.self_attention_cache, part.cross_attention_cache) for part in splits), strict=True
        )
        return cls(type(own[0]).from_batch_splits(own), type(cross[0]).from_batch_splits(cross))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache from a tuple of four tensors per layer: self-attention, then cross-attention."""
        return cls(past_key_values or ())

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:
        """Copies of each layer's self-attention tensors, then of its cross-attention tensors, if any."""
        own, cross = self.self_attention_cache.to_legacy_cache(), self.cross_attention_cache.to_legacy_cache()
        return tuple(pair + cross[layer] for layer, pair in enumerate(own)) if cross else own

    def __getitem__(self, layer_idx: int) -> Any:
        return (*self.self_attention_cache[layer_idx], *self.cross_attention_cache[layer_idx])

    def __len__(self) -> int:
        return len(self.self_attention_cache)

    @property
    def nbytes(self) -> int:
        """Bytes in use by both caches."""
        return sum(part.nbytes for part in (self.self_attention_cache, self.cross_attention_cache))


def _of_self_attention(name: str) -> Any:
    """A method or property of the base, which is that of the self-attention cache."""
    base = getattr(Cache, name)
    if isinstance(base, property):
        return property(lambda cache: getattr(cache.self_attention_cache, name), doc=base.__doc__)

    @wraps(base)
    def method(cache: EncoderDecoderCache, *args: Any, **kwargs: Any) -> Any:
        return getattr(cache.self_attention_cache, name)(*args, **kwargs)

    return method


for _name in (
    "commit_store", "set_store", "get_seq_length", "get_query_offset", "get_mask_sizes",
    "get_max_cache_shape", "layers", "lengths", "is_sliding", "is_compileable",
):  # fmt: skip
    setattr(EncoderDecoderCache, _name, _of_self_attention(_name))


def _own_cache(name: str, cache: Any) -> Cache:
    """The cache, or a copy of a transformers cache as a Descant cache."""
    found: Any = cache
    if isinstance(cache, TransformersCache) and not isinstance(
        cache, Cache | TransformersEncoderDecoderCache
    ):
        found = from_transformers_cache(cache, None)
    if not isinstance(found, Cache) or isinstance(found, TransformersEncoderDecoderCache):
        raise InputError(name, "must be a cache of keys and values, of descant or of transformers", cache)
    return found


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
