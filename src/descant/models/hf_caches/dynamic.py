"""Caches that grow with what is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.evicting import H2OStore, SnapKVStore
from descant.kv_cache.offloaded import OffloadedStore
from descant.kv_cache.paged import PagedStore
from descant.kv_cache.quantized import QuantizedStore
from descant.kv_cache.quantizers import BACKENDS
from descant.kv_cache.sink import RotateFn, SinkStore
from descant.models.hf_caches.base import Cache
from descant.models.hf_caches.configs import CacheConfig, QuantizedCacheConfig
from descant.models.rope import rope_from_config, rope_of_model

__all__ = [
    "DynamicCache",
    "H2OCache",
    "HQQQuantizedCache",
    "OffloadedCache",
    "PagedCache",
    "QuantizedCache",
    "QuantoQuantizedCache",
    "SinkCache",
    "SnapKVCache",
]

Device = torch.device | str
LegacyKV = Iterable[Sequence[Tensor | None]]  # keys and values [R, H, S, D] of every layer


class DynamicCache(Cache):
    """Keys and values of everything read, in memory that grows with it: what models use by default."""

    def __init__(
        self, _distributed_cache_data: LegacyKV | None = None, *, store: KVCache | None = None
    ) -> None:
        super().__init__(DenseStore() if store is None else store)
        if _distributed_cache_data is not None:
            self.write_layers(list(_distributed_cache_data))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache of what a tuple holds: keys and values [R, H, S, D] of every layer."""
        return cls(past_key_values)


class PagedCache(DynamicCache):
    """Keys and values in blocks, which rows that descend from one share (Kwon et al. 2023)."""

    def __init__(self, _distributed_cache_data: LegacyKV | None = None, *, block_size: int = 16) -> None:
        super().__init__(_distributed_cache_data, store=PagedStore(block_size))


class OffloadedCache(DynamicCache):
    """A dynamic cache that rests on another device than the model's; a layer comes when it is its turn."""

    def __init__(
        self, _distributed_cache_data: LegacyKV | None = None, *, offload_device: Device = "cpu"
    ) -> None:
        self.offload_device = torch.device(offload_device)
        super().__init__(_distributed_cache_data, store=OffloadedStore(offload_device))

    def prefetch_layer(self, layer_idx: int) -> None:
        """Begin to bring a layer to the model's device for the next token; forwards do it by themselves."""
        store = self.store
        if isinstance(store, OffloadedStore) and store.lengths.any():
            store.prefetch(layer_idx, self._next_span(1))

    def evict_previous_layer(self, layer_idx: int) -> None:  # noqa: ARG002 - one at the most waits there
        """Let go of the layer that was brought and not yet used; forwards do it by themselves."""
        if isinstance(self.store, OffloadedStore):
            self.store.drop_prefetched()


class QuantizedCache(DynamicCache):
    """Keys and values in few bits but for the latest ones (Liu et al. 2024, KIVI)."""

    backend: str | None = None  # None: what the config says

    def __init__(self, cache_config: QuantizedCacheConfig | CacheConfig | dict[str, object]) -> None:
        made = cache_config
        if isinstance(made, dict):
            made = QuantizedCacheConfig.from_dict(made)
        if not isinstance(made, QuantizedCacheConfig):
            raise InputError(
                "cache_config", "must be a QuantizedCacheConfig, or a dict of its settings", made
            )
        backend = (self.backend or made.backend).lower()
        made.validate(backend)
        self.cache_config = made
        quantizer = BACKENDS[backend](
            made.nbits, made.axis_key, made.axis_value, made.q_group_size, made.compute_dtype
        )
        super().__init__(store=QuantizedStore(quantizer, made.residual_length))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache of what a tuple holds, quantised by the settings that a config begins with."""
        return cls(QuantizedCacheConfig()).write_layers(past_key_values or ())


class QuantoQuantizedCache(QuantizedCache):
    """Keys and values quantised by optimum-quanto, to 2 or 4 bits."""

    backend = "quanto"


class HQQQuantizedCache(QuantizedCache):
    """Keys and values quantised by hqq, to 1, 2, 3, 4 or 8 bits."""

    backend = "hqq"


class SinkCache(Cache):
    """The first positions and the latest ones, so that a text can be as long as one likes (Xiao et al. 2023).

    What a row is first fed is read whole; from the next forward on a token sees `window_length` positions, of
    which the sinks and itself are some. What is fed counts positions on as without this cache. Sinks have to
    be turned to where the window is, for which it must be given the `config` of a model, the `model` or
    a `rotation`: without, it can be used until the window is full. Of a padded batch it must be told
    (`padded`), for the first tokens of a row would be padding otherwise.
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
                kind = type(given).__name__
                raise InputError(
                    "config" if model is None else "model", "must have rotary positions", kind, do
                )
        self.window_length, self.num_sink_tokens = window_length, num_sink_tokens
        self._has_rotation = rotation is not None
        super().__init__(SinkStore(window_length, num_sink_tokens, rotation))

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """How many positions a token sees."""
        return self.window_length

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:  # noqa: ARG002
        if not self._has_rotation and not span.is_first_write and span.read_length > self.window_length:
            must = f"must be known to read more than {self.window_length} positions"
            raise InputError("rotation", must, None, "give SinkCache the `config` of the model")


class _EvictingCache(DynamicCache):
    """A cache that keeps what attention looked at.

    It hears the queries of torch's own attention (`attn_implementation="sdpa"`), and takes every token for
    one that counts: padded batches are for `generate`, which feeds no padding.
    """

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Not here: what padding looks at would count."""
        raise InputError("attention_mask", "cannot be told to this cache", attention_mask, "use `generate`")

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:  # noqa: ARG002
        if isinstance(span.start, Tensor):
            do = "feed rows of one length, or use `generate`"
            raise InputError("past_key_values", "must hold rows of one length", self.lengths.tolist(), do)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """Not here: a tuple does not say what was looked at."""
        raise InputError(
            "past_key_values", "says nothing of attention", past_key_values, "read the text again"
        )


class SnapKVCache(_EvictingCache):
    """Of a prompt what its end looks at, and all that comes after (Li et al. 2024, SnapKV)."""

    def __init__(self, budget: int, window: int = 32, kernel: int = 7) -> None:
        super().__init__(store=SnapKVStore(budget, window, kernel))


class H2OCache(_EvictingCache):
    """The latest positions, and those before that were looked at most (Zhang et al. 2023, H2O)."""

    def __init__(self, budget: int, recent: int | None = None) -> None:
        super().__init__(store=H2OStore(budget, recent))
