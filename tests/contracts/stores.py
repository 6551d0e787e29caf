"""Every cache of keys and values, in sizes so small that a short trace reaches all that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from unittest import mock

import pytest

from descant.core.interfaces import KVCache
from descant.kv_cache.attention import shared_prefix_attention
from descant.kv_cache.stores import paged
from descant.kv_cache.stores.dense import DenseStore, OffloadedStaticStore, OffloadedStore, StaticStore
from descant.kv_cache.stores.evicting import H2OStore, SnapKVStore
from descant.kv_cache.stores.paged import PagedStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import HQQ, Quanto
from descant.kv_cache.stores.sink_window import SinkStore, WindowStore
from descant.testing import CacheTraits, ReferenceCache
from descant.testing.reference_cache import RetentionPolicy

__all__ = ["ROUNDED_BY_HQQ", "STORES", "VARIANTS", "Store", "quietly", "small", "store"]

CAPACITY = 14
# Another name for where everything is: caches take it for another device.
ELSEWHERE = "cpu:0"
ROUNDED_BY_HQQ = "quantized by hqq"


@dataclass(frozen=True)
class Store:
    """How a cache is made, and what it promises beyond being exact."""

    make: Callable[[], KVCache]
    traits: CacheTraits = field(default_factory=CacheTraits)


def last(count: int) -> RetentionPolicy:
    """The last so many positions."""
    return lambda positions: positions[max(len(positions) - count, 0) :]


def ends(first: int, count: int) -> RetentionPolicy:
    """The first positions and the last so many."""

    def keeps(positions: Sequence[int]) -> Sequence[int]:
        if len(positions) <= first + count:
            return positions
        return [*positions[:first], *positions[len(positions) - count :]]

    return keeps


def windowed(*windows: int | None, slack: int, room: int) -> Store:
    """A store with a window for each layer."""
    keeps = [None if window is None else last(window - 1) for window in windows]
    return Store(lambda: WindowStore(windows, slack, room), CacheTraits(keeps))


def fixed(make: Callable[[], KVCache]) -> Store:
    """A store with room for a number of positions."""
    return Store(make, CacheTraits(capacity=CAPACITY))


def rounding(make: Callable[[], KVCache], error: float) -> Store:
    """A store that keeps few bits of a number."""
    return Store(make, CacheTraits(error=error))


# One of each kind.
STORES: dict[str, Store] = {
    "list": Store(ReferenceCache, CacheTraits(frees_memory=True)),
    "dense": Store(DenseStore),
    "paged": Store(lambda: PagedStore(block_size=3)),
    "window": windowed(None, 3, slack=2, room=1),
    "sink": Store(
        lambda: SinkStore(5, 1, lambda keys, shift: keys, slack=2, room=1), CacheTraits(ends(1, 3))
    ),
    "static": fixed(lambda: StaticStore(CAPACITY)),
    "offloaded": Store(lambda: OffloadedStore(ELSEWHERE)),
    "offloaded_static": fixed(lambda: OffloadedStaticStore(CAPACITY, device=ELSEWHERE)),
    "quantized": rounding(lambda: QuantizedStore(Quanto(4), 4), 0.3),
    "snapkv": Store(lambda: SnapKVStore(6, window=3, kernel=3), CacheTraits("own")),
    "h2o": Store(lambda: H2OStore(6, 3), CacheTraits("own")),
}
# The same in other sizes, at the edges of what they allow.
VARIANTS: dict[str, Store] = {
    "list, forgetful": Store(lambda: ReferenceCache([last(3), None]), CacheTraits([last(3), None])),
    "paged, a slot a block": Store(lambda: PagedStore(block_size=1)),
    "paged, large blocks": Store(lambda: PagedStore(block_size=16)),
    "window, no slack": windowed(3, 5, slack=0, room=1),
    "window of one": windowed(1, 6, slack=1, room=4),
    "sink, no slack": Store(
        lambda: SinkStore(4, 2, lambda keys, shift: keys, slack=0, room=1), CacheTraits(ends(2, 1))
    ),
    "static, few rows": fixed(lambda: StaticStore(CAPACITY, 6)),
    "quantized at once": rounding(lambda: QuantizedStore(Quanto(4), 0), 0.3),
    "quantized to two bits": rounding(lambda: QuantizedStore(Quanto(2, axis_key=-1), 3), 1.5),
    ROUNDED_BY_HQQ: rounding(lambda: QuantizedStore(HQQ(8, axis_key=1, axis_value=1), 3), 0.05),
    "snapkv, all of it": Store(lambda: SnapKVStore(4, window=4, kernel=1), CacheTraits("own")),
    "h2o, one recent": Store(lambda: H2OStore(3, 1), CacheTraits("own")),
}


def store(name: str) -> Store:
    """The store of that name."""
    return STORES[name] if name in STORES else VARIANTS[name]


@contextmanager
def small() -> Iterator[None]:
    """What a cache does for long texts alone it does for short ones, too."""
    with (
        mock.patch.object(shared_prefix_attention, "_MIN_SHARED_SLOTS", 3),
        mock.patch.object(paged, "_MIN_SLAB_SLOTS", 5),
    ):
        yield


def quietly(patch: pytest.MonkeyPatch) -> None:
    """Let paged caches that were broken on purpose go without a word."""
    last_words = PagedStore.__del__

    def say_nothing(self: PagedStore) -> None:
        with suppress(RuntimeError):
            last_words(self)

    patch.setattr(PagedStore, "__del__", say_nothing)
