"""Caches that grow with the sequence: dynamic, paged, offloaded, quantized, sink and evicting."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from descant.config.cache_config import CacheConfig, QuantizedCacheConfig
from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.dense import DenseStore, OffloadedStore
from descant.kv_cache.stores.evicting import H2OStore, SnapKVStore
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import build_quantizer
from descant.kv_cache.stores.sink_window import RotateFn, SinkStore
from descant.models.compat.hf_caches.base import Cache
from descant.models.forward.rope import rope_from_config, rope_of_model, rope_of_running_model

Device = torch.device | str
LegacyKV = Iterable[Sequence[Tensor | None]]  # keys and values [R, H, S, D] of every layer


class DynamicCache(Cache):
    """All keys and values in memory that grows with the sequence; the default of most models."""

    def __init__(
        self, _distributed_cache_data: LegacyKV | None = None, *, store: KVCache | None = None
    ) -> None:
        super().__init__(DenseStore() if store is None else store)
        if _distributed_cache_data is not None:
            self.write_layers(list(_distributed_cache_data))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache from a tuple of keys and values [R, H, S, D] per layer."""
        return cls(past_key_values)


class PagedCache(DynamicCache):
    """Keys and values in blocks that forked rows share (Kwon et al. 2023, PagedAttention)."""

    def __init__(self, _distributed_cache_data: LegacyKV | None = None, *, block_size: int = 16) -> None:
        super().__init__(_distributed_cache_data, store=PagedStore(block_size))


class OffloadedCache(DynamicCache):
    """A dynamic cache kept on another device than the model; each layer is fetched when it is needed."""

    def __init__(
        self, _distributed_cache_data: LegacyKV | None = None, *, offload_device: Device = "cpu"
    ) -> None:
        self.offload_device = torch.device(offload_device)
        super().__init__(_distributed_cache_data, store=OffloadedStore(offload_device))

    def prefetch_layer(self, layer_idx: int) -> None:
        """Start copying a layer to the device of the model; forwards do this automatically."""
        store = self.commit_store()
        if isinstance(store, OffloadedStore) and store.lengths.any():
            store.prefetch(layer_idx, self._next_span(1))

    def evict_previous_layer(self, layer_idx: int) -> None:  # noqa: ARG002 - at most one layer is prefetched
        """Drop the layer that was prefetched but not used; forwards do this automatically."""
        store = self.commit_store()
        if isinstance(store, OffloadedStore):
            store.drop_prefetched()


class QuantizedCache(DynamicCache):
    """Quantized keys and values, the most recent ones in full precision (Liu et al. 2024, KIVI)."""

    backend: str | None = None  # None: the backend of the config

    def __init__(self, cache_config: QuantizedCacheConfig | CacheConfig | dict[str, object]) -> None:
        config = (
            QuantizedCacheConfig.from_dict(cache_config) if isinstance(cache_config, dict) else cache_config
        )
        if not isinstance(config, QuantizedCacheConfig):
            must = "must be a QuantizedCacheConfig or a dict of its settings"
            raise InputError("cache_config", must, config)
        backend = (self.backend or config.backend).lower()
        config.validate(backend)
        self.cache_config = config
        self.nbits, self.q_group_size, self.residual_length = (
            config.nbits,
            config.q_group_size,
            config.residual_length,
        )
        self.axis_key, self.axis_value = config.axis_key, config.axis_value
        self.compute_dtype, self.device = config.compute_dtype, torch.device(config.device)
        super().__init__(store=QuantizedStore(build_quantizer(config, backend), config.residual_length))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache from a tuple, quantized with the default settings."""
        return cls(QuantizedCacheConfig()).write_layers(past_key_values or ())


class QuantoQuantizedCache(QuantizedCache):
    """Keys and values quantized by optimum-quanto to 2 or 4 bits."""

    backend = "quanto"


class HQQQuantizedCache(QuantizedCache):
    """Keys and values quantized by hqq to 1, 2, 3, 4 or 8 bits."""

    backend = "hqq"


class SinkCache(Cache):
    """The first positions and the most recent ones, for texts of any length (Xiao et al. 2023).

    The first forward of a row is read whole. From then on a token sees `window_length` positions, the sinks
    and itself included. Models count fed positions as without this cache. The keys of sinks are rotated to
    the start of the window. How they are rotated is known from a `rotation`, the `config` of the model or the
    `model`; without one of them, from the model whose forward fills the window. For a padded batch call
    `set_padding` first, or padding becomes the sinks.
    """

    def __init__(
        self,
        window_length: int,
        num_sink_tokens: int,
        *,
        config: Any = None,
        model: Any = None,
        rotation: RotateFn | Sequence[RotateFn | None] | None = None,
    ) -> None:
        if rotation is None and (given := model if config is None else config) is not None:
            rotation = rope_from_config(config) if model is None else rope_of_model(model)
            if rotation is None:
                do = "give it the model" if model is None else "use another cache"
                name = "config" if model is None else "model"
                raise InputError(name, "must have rotary positions", type(given).__name__, do)
        self.window_length, self.num_sink_tokens = window_length, num_sink_tokens
        self._has_rotation = rotation is not None
        super().__init__(SinkStore(window_length, num_sink_tokens, rotation))

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """The number of cached positions; for a module, which computes positions from it, of those read."""
        num_read = super().get_seq_length(layer_idx)
        frame = sys._getframe(1)
        while frame.f_back is not None and isinstance(frame.f_locals.get("self"), Cache):
            frame = frame.f_back
        is_module = isinstance(frame.f_locals.get("self"), torch.nn.Module)
        return num_read if is_module else min(num_read, self.window_length)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """The number of positions that a token sees."""
        return self.window_length

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:  # noqa: ARG002
        if self._has_rotation or span.is_first_write or span.read_length <= self.window_length:
            return
        rotation = rope_of_running_model()
        if rotation is None:
            must = f"must be given to read more than {self.window_length} positions of this model"
            raise InputError(
                "rotation", must, None, "give SinkCache the `config` of a model that rotates keys"
            )
        assert isinstance(self._store, SinkStore)
        self._store.set_rotation(rotation)
        self._has_rotation = True


class _EvictingCache(DynamicCache):
    """Base of the caches that evict by attention scores.

    Requires `attn_implementation="sdpa"`, whose queries the store records. Padding would be scored like any
    token, so padded batches are supported by `generate` only, which feeds no padding.
    """

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Not supported: padding would take part in the attention scores."""
        must = f"must not be set for a {type(self).__name__}"
        raise InputError("attention_mask", must, attention_mask, "use `generate`")

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:  # noqa: ARG002
        if isinstance(span.start, Tensor):
            do = "feed rows of equal length, or use `generate`"
            raise InputError("past_key_values", "must hold rows of equal length", self.lengths.tolist(), do)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """Not supported: a tuple holds no attention scores."""
        must = f"must hold attention scores for a {cls.__name__}, which tuples do not"
        raise InputError("past_key_values", must, past_key_values, "feed the text again")


class SnapKVCache(_EvictingCache):
    """Keeps the prompt positions that its end attends to, and all later ones (Li et al. 2024, SnapKV)."""

    def __init__(self, budget: int, window: int = 32, kernel: int = 7) -> None:
        super().__init__(store=SnapKVStore(budget, window, kernel))


class H2OCache(_EvictingCache):
    """Keeps recent positions and the earlier ones with the highest attention (Zhang et al. 2023, H2O)."""

    def __init__(self, budget: int, recent: int | None = None) -> None:
        super().__init__(store=H2OStore(budget, recent))
