"""The cache of an encoder-decoder model: one for each kind of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from descant.core.interfaces import KVCache
from descant.errors import InputError
from descant.models.hf_caches.base import Cache
from descant.models.hf_caches.dynamic import DynamicCache
from descant.models.hf_caches.layers import KVPair

__all__ = ["EncoderDecoderCache"]


class EncoderDecoderCache(Cache, TransformersEncoderDecoderCache):
    """What a decoder has read, and what it sees of the encoder's output: a cache for each."""

    def __init__(self, self_attention_cache: Any, cross_attention_cache: Any = None) -> None:
        if cross_attention_cache is None:  # what `iter` of such a cache gave
            pairs = [tuple(pair) for pair in self_attention_cache]
            half = [len(pair) // 2 for pair in pairs]
            self_attention_cache = DynamicCache([pair[:n] for pair, n in zip(pairs, half, strict=True)])
            cross_attention_cache = DynamicCache([pair[n:] for pair, n in zip(pairs, half, strict=True)])
        for name, one in (("self", self_attention_cache), ("cross", cross_attention_cache)):
            if not isinstance(one, Cache) or isinstance(one, EncoderDecoderCache):
                raise InputError(f"{name}_attention_cache", "must be a cache of this library", one)
        self.self_attention_cache: Any = self_attention_cache
        self.cross_attention_cache: Any = cross_attention_cache
        self.offloading = False
        self.layer_class_to_replicate = None
        layers = range(len(cross_attention_cache))
        self.is_updated = {layer: cross_attention_cache.get_seq_length(layer) > 0 for layer in layers}

    @property
    def _self_cache(self) -> Cache:
        own: Cache = self.self_attention_cache
        return own

    @property
    def _cross_cache(self) -> Cache:
        cross: Cache = self.cross_attention_cache
        return cross

    @property
    def store(self) -> KVCache:
        """Where the decoder's own keys and values lie."""
        return self._self_cache.store

    @store.setter
    def store(self, store: KVCache) -> None:
        self._self_cache.store = store

    @property
    def _store(self) -> KVCache:  # type: ignore[override]
        return self._self_cache._store

    @property
    def read_only(self) -> bool:
        """Whether it is read and never written."""
        return self._self_cache.read_only

    @read_only.setter
    def read_only(self, frozen: bool) -> None:
        for one in (self._self_cache, self._cross_cache):
            one.read_only = frozen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *given: Any, **more: Any
    ) -> KVPair:
        """Write to the decoder's own part."""
        return self._self_cache.update(key_states, value_states, layer_idx, *given, **more)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """How many positions the decoder has read."""
        return self._self_cache.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys self-attention will see, and the position of the first."""
        return self._self_cache.get_mask_sizes(query_length, layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:
        """How many positions the decoder can read; None: no limit."""
        return self._self_cache.get_max_cache_shape(layer_idx)

    def _select_rows(self, rows: Tensor) -> None:
        for one in (self._self_cache, self._cross_cache):
            one._select_rows(rows)

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Say which of the decoder's first tokens are padding, from its mask [R, T]."""
        self._self_cache.set_padding(attention_mask)
        return self

    def crop(self, max_length: int) -> None:
        """Cut what the decoder has read; what it sees of the encoder stays."""
        self._self_cache.crop(max_length)

    def reset(self) -> None:
        """Forget every row, and what the encoder said."""
        for one in (self._self_cache, self._cross_cache):
            one.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def _copy_rows(self, rows: Tensor) -> Self:
        return type(self)(self._self_cache._copy_rows(rows), self._cross_cache._copy_rows(rows))

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """One cache of the rows of several, which stay as they are."""
        if not splits:
            raise InputError("splits", "must be caches, one or more", splits)
        own, cross = zip(*((one._self_cache, one._cross_cache) for one in splits), strict=True)
        return cls(type(own[0]).from_batch_splits(own), type(cross[0]).from_batch_splits(cross))

    @classmethod
    def from_legacy_cache(cls, past_key_values: Sequence[Sequence[Tensor]] | None = None) -> Self:
        """A cache of what a tuple holds: own keys and values of every layer, then those of the encoder."""
        pairs = past_key_values or ()
        own, cross = DynamicCache([pair[:2] for pair in pairs]), DynamicCache([pair[2:4] for pair in pairs])
        return cls(own, cross)

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:
        """Own keys and values of every layer, then those of the encoder if it was read, copied."""
        own, cross = self._self_cache.to_legacy_cache(), self._cross_cache.to_legacy_cache()
        return tuple(pair + cross[at] for at, pair in enumerate(own)) if cross else own

    def __getitem__(self, layer_idx: int) -> Any:
        return (*self._self_cache[layer_idx], *self._cross_cache[layer_idx])

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))

    def __len__(self) -> int:
        return len(self._self_cache)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of its own part."""
        return self._self_cache.layers

    @property
    def nbytes(self) -> int:
        """What both parts take in memory."""
        return sum(one.nbytes for one in (self._self_cache, self._cross_cache))

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers of its own part forget what has left their window."""
        return self._self_cache.is_sliding

    @property
    def is_compileable(self) -> bool:
        """Whether the shapes of its own part never change."""
        return self._self_cache.is_compileable
