"""Caches that are made for a model, for so many rows and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.offloaded import OffloadedStaticStore
from descant.kv_cache.static import StaticStore
from descant.kv_cache.window import WindowStore
from descant.models.hf_caches.base import Cache
from descant.models.hf_caches.layers import KVPair

__all__ = [
    "CacheShape",
    "HybridCache",
    "OffloadedStaticCache",
    "SizedCache",
    "SlidingWindowCache",
    "StaticCache",
    "layer_windows",
]

Device = torch.device | str | int

# Kinds of layer that keep keys and values, and what their window is called; None: they see everything.
_WINDOW_SETTINGS: dict[str, str | None] = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "sliding_window",
}


@dataclass(frozen=True)
class CacheShape:
    """For what a cache is made."""

    windows: Sequence[int | None]  # how far back each layer sees; None: everything
    max_batch_size: int | None = None  # at the most; None: any
    max_cache_len: int | None = None
    device: Device | None = None
    dtype: torch.dtype | None = None
    layer_devices: Mapping[int, Device] | None = None  # by layer
    max_rewind: int = 64  # by how many positions rows may be cut that have left a window

    @property
    def capacity(self) -> int:
        """How many positions there must be room for."""
        if self.max_cache_len is None:
            raise InputError("max_cache_len", "must be given", None)
        return self.max_cache_len

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.max_batch_size), ("max_cache_len", self.max_cache_len)):
            if value is not None and value < 1:
                raise InputError(name, "must be >= 1", value)


class SizedCache(Cache):
    """A cache that is made for a model, for so many rows and positions at the most."""

    def __init__(  # noqa: PLR0913 - as documented
        self,
        config: Any,
        batch_size: int | None = None,
        max_cache_len: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        layer_device_map: Mapping[int, Device] | None = None,
        *,
        max_batch_size: int | None = None,
    ) -> None:
        rows = max_batch_size if batch_size is None else batch_size
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        positions = longest if max_cache_len is None else max_cache_len
        self._init_from_shape(
            CacheShape(layer_windows(config), rows, positions, device, dtype, layer_device_map)
        )

    @classmethod
    def from_shape(cls, made: CacheShape) -> Self:
        """One without the config of a model."""
        face = cls.__new__(cls)
        face._init_from_shape(made)
        return face

    def _init_from_shape(self, made: CacheShape) -> None:
        self.cache_shape = made
        self.max_batch_size, self.max_cache_len = made.max_batch_size, made.max_cache_len
        self.device = None if made.device is None else torch.device(made.device)
        self.dtype = made.dtype
        super().__init__(self._make_store(made))

    def _make_store(self, made: CacheShape) -> KVCache:
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """How many rows it has, or is made for."""
        return len(self._store) or self.max_batch_size or -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """How many positions it can hold."""
        return self.max_cache_len

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:
        if self.max_batch_size is not None and key.shape[0] > self.max_batch_size:
            raise InputError("batch_size", f"must be >= the {key.shape[0]} rows fed", self.max_batch_size)
        if self.dtype is not None and key.dtype != self.dtype:
            raise InputError("dtype", f"must be the model's {key.dtype}", self.dtype)
        device = (self.cache_shape.layer_devices or {}).get(layer, self.device)
        if device is not None and torch.device(device).type != key.device.type:
            raise InputError("device", f"must be the {key.device} of layer {layer}", device)
        most = self.max_cache_len
        if most is not None and span.read_length > most and self._has_full_layers:
            raise InputError("max_cache_len", f"must be >= the {span.read_length} positions read", most)

    @property
    def _has_full_layers(self) -> bool:
        """Whether there are layers that keep everything."""
        return True


def layer_windows(config: Any) -> list[int | None]:
    """How far back each layer that has a cache sees; None: everything."""
    kinds, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if other := sorted(set(kinds) - set(_WINDOW_SETTINGS)):
        raise InputError("config", "must be of a model that keeps keys and values only", other)
    named = zip((_WINDOW_SETTINGS[kind] for kind in kinds), settings, strict=True)
    return [None if name is None else int(given[name]) for name, given in named]


class StaticCache(SizedCache):
    """Room for all that will be read, made with the first write: shapes that never change."""

    def _make_store(self, made: CacheShape) -> KVCache:
        return StaticStore(made.capacity, made.max_batch_size)

    def _full_blocks(self, layer: int) -> KVPair | None:
        """All slots of a layer, used or not."""
        lent = self._store.layer_views(len(self._store)) if isinstance(self._store, StaticStore) else None
        return None if lent is None else (lent[0][layer], lent[1][layer])

    def _visible_kv(self, layer: int, seen: KVPair) -> KVPair:
        return self._full_blocks(layer) or seen

    def _visible_sizes(self, layer: int, span: KVSpan) -> tuple[int, int, int]:
        size, first, at = super()._visible_sizes(layer, span)
        level = not isinstance(span.start, Tensor) and self._left_pads is None
        return self.cache_shape.capacity if level and self.is_compileable else size, first, at

    @property
    def key_cache(self) -> list[Tensor]:
        """Keys of every layer [R, H, max_cache_len, D]."""
        return [(self._full_blocks(layer) or self[layer])[0] for layer in range(len(self))]

    @property
    def value_cache(self) -> list[Tensor]:
        """Values of every layer [R, H, max_cache_len, D]."""
        return [(self._full_blocks(layer) or self[layer])[1] for layer in range(len(self))]

    @property
    def is_compileable(self) -> bool:
        """Whether its shapes never change."""
        return True


class OffloadedStaticCache(StaticCache):
    """A static cache that rests on another device than the model's; a layer comes when it is its turn."""

    def __init__(  # noqa: PLR0913 - as documented
        self,
        config: Any,
        max_batch_size: int | None = None,
        max_cache_len: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        offload_device: Device = "cpu",
        layer_device_map: Mapping[int, Device] | None = None,
    ) -> None:
        self.offload_device = torch.device(offload_device)
        super().__init__(config, max_batch_size, max_cache_len, device, dtype, layer_device_map)

    def _make_store(self, made: CacheShape) -> KVCache:
        return OffloadedStaticStore(made.capacity, made.max_batch_size, self.offload_device)

    def _full_blocks(self, layer: int) -> KVPair | None:  # noqa: ARG002
        return None  # it is shown what has come

    @property
    def is_compileable(self) -> bool:
        """It is shown no more than was read."""
        return False


class HybridCache(SizedCache):
    """For models whose layers see partly a window and partly everything: each keeps what it can see again."""

    def _make_store(self, made: CacheShape) -> KVCache:
        if not any(made.windows):
            none = f"{len(made.windows)} layers without"
            raise InputError("config", "must be of a model with windows", none, "use StaticCache")
        return WindowStore(made.windows, made.max_rewind)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers forget what has left their window."""
        return [window is not None for window in self.cache_shape.windows]

    @property
    def _has_full_layers(self) -> bool:
        return None in self.cache_shape.windows


class SlidingWindowCache(HybridCache):
    """For models whose layers see a window: what has left it is forgotten, so any length can be read."""

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:
        """How many positions it holds at once."""
        both = [one for one in (self.cache_shape.windows[layer_idx], self.max_cache_len) if one is not None]
        return min(both, default=None)
