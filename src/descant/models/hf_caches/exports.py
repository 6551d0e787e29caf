"""The public cache classes, collected for `descant`."""

from __future__ import annotations

from descant.config.cache_config import CacheConfig, QuantizedCacheConfig, StaticCacheConfig
from descant.models.hf_caches.base import Cache
from descant.models.hf_caches.convert import to_descant_cache
from descant.models.hf_caches.dynamic import (
    DynamicCache,
    H2OCache,
    HQQQuantizedCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    QuantoQuantizedCache,
    SinkCache,
    SnapKVCache,
)
from descant.models.hf_caches.encoder_decoder import EncoderDecoderCache
from descant.models.hf_caches.recurrent import MambaCache, RecurrentCache
from descant.models.hf_caches.sized import HybridCache, OffloadedStaticCache, SlidingWindowCache, StaticCache

__all__ = [
    "Cache",
    "CacheConfig",
    "DynamicCache",
    "EncoderDecoderCache",
    "H2OCache",
    "HQQQuantizedCache",
    "HybridCache",
    "MambaCache",
    "OffloadedCache",
    "OffloadedStaticCache",
    "PagedCache",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantoQuantizedCache",
    "RecurrentCache",
    "SinkCache",
    "SlidingWindowCache",
    "SnapKVCache",
    "StaticCache",
    "StaticCacheConfig",
    "to_descant_cache",
]
