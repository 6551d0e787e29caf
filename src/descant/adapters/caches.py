"""The documented caches by name: each a transformers cache over one of our stores."""

from __future__ import annotations

from descant.adapters.acceptance import accepted
from descant.adapters.cache_configs import CacheConfig, QuantizedCacheConfig, StaticCacheConfig
from descant.adapters.faces import Cache
from descant.adapters.growing import (
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
from descant.adapters.pairs import EncoderDecoderCache
from descant.adapters.sized import HybridCache, OffloadedStaticCache, SlidingWindowCache, StaticCache
from descant.adapters.states import MambaCache, OwnCache

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
    "OwnCache",
    "PagedCache",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantoQuantizedCache",
    "SinkCache",
    "SlidingWindowCache",
    "SnapKVCache",
    "StaticCache",
    "StaticCacheConfig",
    "accepted",
]
