"""Caches with a maximum size: static, offloaded static, hybrid and sliding window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.dense import OffloadedStaticStore, StaticStore
from descant.kv_cache.stores.sink_window import WindowStore
from descant.models.compat.hf_caches.base import Cache
from descant.models.forward.cache_layers import DYNAMIC_LAYERS, KVPair

Device = torch.device | str | int


@dataclass(frozen=True)
class CacheShape:
    """The limits of a sized cache."""

    windows: Sequence[int | None]  # window of each layer; None: full attention
    max_batch_size: int | None = None  # None: no limit
    max_cache_len: int | None = None
    device: Device | None = None
    dtype: torch.dtype | None = None
    layer_devices: Mapping[int, Device] | None = None  # by layer
    max_rewind: int = 64  # positions by which rows can be rewound after they left a window
    kv_heads: tuple[int, int] | None = None  # key heads and their size, if the config declares them

    @property
    def capacity(self) -> int:
        """`max_cache_len`; raises if it is not set."""
        if self.max_cache_len is None:
            raise InputError("max_cache_len", "must be given", None)
        return self.max_cache_len

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.max_batch_size), ("max_cache_len", self.max_cache_len)):
            if value is not None and value < 1:
                raise InputError(name, "must be >= 1", value)


class SizedCache(Cache):
    """Base of the caches that are created for a model, with a maximum batch size and length.

    By default `dtype` is float32 and `device` is torch's default device; a `dtype` of None is the model's.
    """

    def __init__(  # noqa: PLR0913 - as documented
        self,
        config: Any,
        batch_size: int | None = None,
        max_cache_len: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.float32,
        layer_device_map: Mapping[int, Device] | None = None,
        *,
        max_batch_size: int | None = None,
    ) -> None:
        rows = max_batch_size if batch_size is None else batch_size
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        positions = longest if max_cache_len is None else max_cache_len
        self._init_from_shape(
            CacheShape(
                layer_windows(config),
                rows,
                positions,
                torch.get_default_device() if device is None else device,
                dtype,
                layer_device_map,
                kv_heads=_kv_heads(config),
            )
        )

    @classmethod
    def from_shape(cls, shape: CacheShape) -> Self:
        """A cache from its limits, without a model config."""
        cache = cls.__new__(cls)
        cache._init_from_shape(shape)
        return cache

    def _init_from_shape(self, shape: CacheShape) -> None:
        self.cache_shape = shape
        self.max_batch_size, self.max_cache_len = shape.max_batch_size, shape.max_cache_len
        super().__init__(self._make_store(shape))

    def _make_store(self, shape: CacheShape) -> KVCache:
        raise NotImplementedError

    @property
    def device(self) -> torch.device | None:
        """The device of the keys and values, as it was given or else as they have it; None: not known yet."""
        given = self.cache_shape.device
        contents = None if given is not None else next(iter(self._list_layers().values()), None)
        return torch.device(given) if given is not None else None if contents is None else contents[0].device

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the keys and values, as it was given or else as they have it; None: not known yet."""
        contents = None if self.cache_shape.dtype else next(iter(self._list_layers().values()), None)
        return self.cache_shape.dtype if contents is None else contents[0].dtype

    @property
    def batch_size(self) -> int:
        """The number of rows, or the maximum before the first forward."""
        return len(self._store) or self.max_batch_size or -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """The maximum number of positions."""
        return self.max_cache_len

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:
        if self.max_batch_size is not None and key.shape[0] > self.max_batch_size:
            raise InputError("batch_size", f"must be >= the {key.shape[0]} rows fed", self.max_batch_size)
        dtype = self.cache_shape.dtype
        if dtype is not None and key.dtype != dtype:
            do = f"give {type(self).__name__} dtype=model.dtype"
            raise InputError("dtype", f"must be {key.dtype}, the dtype of the model", dtype, do)
        device = (self.cache_shape.layer_devices or {}).get(layer, self.cache_shape.device)
        if device is not None and torch.device(device).type != key.device.type:
            do = f"give {type(self).__name__} device=model.device"
            raise InputError("device", f"must be {key.device}, the device of layer {layer}", device, do)
        limit = self.max_cache_len
        if limit is not None and span.read_length > limit and self._has_full_layers:
            raise InputError("max_cache_len", f"must be >= the {span.read_length} positions read", limit)

    @property
    def _has_full_layers(self) -> bool:
        """Whether any layer has full attention."""
        return True


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer that has a cache; None: full attention."""
    layers: list[Any] = transformers.DynamicCache(config=config.get_text_config(decoder=True)).layers
    if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in DYNAMIC_LAYERS}):
        raise InputError("config", "must have attention layers only", unknown)
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _kv_heads(config: Any) -> tuple[int, int] | None:
    """The number of key heads and their size; None if layers differ or declare none."""
    shapes = set()
    for layer in config.get_text_config(decoder=True).per_layer_config:
        heads = getattr(layer, "num_attention_heads", None)
        # Latent attention caches other shapes than the config's heads have.
        if heads is None or hasattr(layer, "kv_lora_rank"):
            return None
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shapes.add((int(getattr(layer, "num_key_value_heads", None) or heads), int(size)))
    return shapes.pop() if len(shapes) == 1 else None


class StaticCache(SizedCache):
    """Keys and values in blocks of fixed shape, allocated when they are first written or read."""

    def _make_store(self, shape: CacheShape) -> KVCache:
        return StaticStore(shape.capacity, shape.max_batch_size)

    def _full_blocks(self, layer: int) -> KVPair | None:
        """All slots of a layer, used or not; None before the first write."""
        views = self._store.layer_views(len(self._store)) if isinstance(self._store, StaticStore) else None
        return None if views is None else (views[0][layer], views[1][layer])

    def _visible_kv(self, layer: int, visible: KVPair) -> KVPair:
        return self._full_blocks(layer) or visible

    def _visible_sizes(self, layer: int, span: KVSpan) -> tuple[int, int, int]:
        size, first_position, new_slot = super()._visible_sizes(layer, span)
        uniform = not isinstance(span.start, Tensor) and self._left_pads is None
        size = self.cache_shape.capacity if uniform and self.is_compileable else size
        return size, first_position, new_slot

    def _all_blocks(self) -> list[KVPair]:
        """The blocks of every layer [R, H, max_cache_len, D].

        Those of an empty cache are allocated, as a forward will write them, and zero.
        """
        shape, store = self.cache_shape, self._store
        rows, kv_heads = shape.max_batch_size, shape.kv_heads
        if len(store) or rows is None or kv_heads is None or self.dtype is None:
            return [self._full_blocks(layer) or self[layer] for layer in range(len(self))]
        assert isinstance(store, StaticStore)
        heads, size = kv_heads
        for layer in range(len(shape.windows)):
            device = (shape.layer_devices or {}).get(layer, self.device)
            store.reserve(layer, torch.empty(0, heads, 0, size, dtype=self.dtype, device=device))
        views = store.layer_views(rows)
        assert views is not None
        return [(views[0][layer], views[1][layer]) for layer in range(len(shape.windows))]

    def reset(self) -> None:
        """Remove every row and fill the blocks with zeros; their addresses stay."""
        super().reset()
        if isinstance(self._store, StaticStore):
            self._store.clear_blocks()

    @property
    def is_compileable(self) -> bool:
        """Whether shapes are static."""
        return True


class OffloadedStaticCache(StaticCache):
    """A static cache kept on another device than the model; each layer is fetched when it is needed."""

    def __init__(  # noqa: PLR0913 - as documented
        self,
        config: Any,
        max_batch_size: int | None = None,
        max_cache_len: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = torch.float32,
        offload_device: Device = "cpu",
        layer_device_map: Mapping[int, Device] | None = None,
    ) -> None:
        self.offload_device = torch.device(offload_device)
        super().__init__(config, max_batch_size, max_cache_len, device, dtype, layer_device_map)

    def _make_store(self, shape: CacheShape) -> KVCache:
        return OffloadedStaticStore(shape.capacity, shape.max_batch_size, self.offload_device)

    def _full_blocks(self, layer: int) -> KVPair | None:  # noqa: ARG002
        return None  # attention sees only the slots that were fetched

    @property
    def is_compileable(self) -> bool:
        """False: attention sees only the positions read."""
        return False


class HybridCache(SizedCache):
    """For models that mix sliding-window and full attention; windowed layers keep their window only."""

    def _make_store(self, shape: CacheShape) -> KVCache:
        if not any(shape.windows):
            must = "must be the config of a model with sliding windows"
            raise InputError("config", must, f"{len(shape.windows)} layers without", "use StaticCache")
        return WindowStore(shape.windows, shape.max_rewind)

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it drops what leaves its window."""
        return [window is not None for window in self.cache_shape.windows]

    @property
    def _has_full_layers(self) -> bool:
        return None in self.cache_shape.windows


class SlidingWindowCache(HybridCache):
    """For models with sliding windows in all layers: positions outside the window are dropped."""

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:
        """The maximum number of positions held at once."""
        limits = [self.cache_shape.windows[layer_idx], self.max_cache_len]
        return min((limit for limit in limits if limit is not None), default=None)
