"""Layer objects in the form that transformers expects, and helpers on blocks [R, H, S, D]."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import cache_utils

from descant.core.interfaces import KVCache
from descant.errors import format_value
from descant.kv_cache.attention.attention_proxy import KVProxy

KVPair = tuple[Tensor, Tensor]  # keys and values of a layer, [R, H, S, D] each

# Layers that stay empty, since the model's layer reads the keys of another or has no attention; transformers
# has them from 5.23 on.
LAYERS_WITHOUT_KV: tuple[type, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)
# The layers of a transformers cache that grows and holds nothing but keys and values.
DYNAMIC_LAYERS: tuple[type, ...] = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    *LAYERS_WITHOUT_KV,
)


class HFCacheLayer:
    """One layer of a cache in the form that transformers expects; contents are read lazily."""

    supports_early_init = False  # the store allocates at the first write

    def __init__(self, cache: Any, layer: int) -> None:
        self._cache, self._layer = cache, layer

    @property
    def keys(self) -> Tensor:
        """Keys [R, H, S, D]."""
        return cast(Tensor, self._cache[self._layer][0])

    @property
    def values(self) -> Tensor:
        """Values [R, H, S, D]."""
        return cast(Tensor, self._cache[self._layer][1])

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return bool(self._cache.has_layer(self._layer))

    @property
    def is_sliding(self) -> bool:
        """Whether it drops what leaves its window."""
        return bool(self._cache.is_sliding[self._layer])

    @property
    def is_compileable(self) -> bool:
        """Whether its shape is static."""
        return bool(self._cache.is_compileable)

    def get_seq_length(self) -> int:
        """The number of positions it has read."""
        return int(self._cache.get_query_offset(self._layer))

    def __repr__(self) -> str:
        return f"{type(self._cache).__name__} layer {self._layer}"


def empty_layers(store: KVCache) -> dict[int, KVPair]:
    """The layers of a store, each as an empty pair [1, H, 0, D] that carries shape, dtype and device."""
    longest = store.lengths.argmax()[None]
    pairs = {layer: store.read(layer, longest) for layer in store.layers}
    return {layer: (key[:, :, :0], value[:, :, :0]) for layer, (key, value) in pairs.items()}


def to_tensor(block: Any) -> Tensor:
    """The block as a plain tensor; a KVProxy is materialized."""
    if isinstance(block, KVProxy):
        return block.materialize()
    assert isinstance(block, Tensor), format_value(block)
    return block


def shift_right(block: Tensor, by: Tensor) -> Tensor:
    """Shift the slots of each row [R, H, S, D] to the right by `by` [R] (host) and fill with zeros."""
    source = torch.arange(block.shape[2]) - by[:, None]  # [R, S]
    clamped = source.clamp(0, block.shape[2] - 1)
    index = clamped.to(block.device)[:, None, :, None]
    moved = block.gather(2, index.expand(-1, block.shape[1], -1, block.shape[3]))
    return moved.masked_fill((source != clamped).to(block.device)[:, None, :, None], 0)


def with_grad(visible: Any, new: Tensor, start: int) -> Tensor:
    """Replace the slots from `start` on by `new`: gradients reach the fed tokens but not the cache."""
    return torch.cat((visible[:, :, :start], new, visible[:, :, start + new.shape[2] :]), 2)
