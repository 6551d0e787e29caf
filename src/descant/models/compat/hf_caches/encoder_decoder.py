"""The cache of an encoder-decoder model: one cache for self-attention, one for cross-attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from descant.core.interfaces import KVCache
from descant.errors import InputError
from descant.models.compat.hf_caches.base import Cache
from descant.models.compat.hf_caches.dynamic import DynamicCache
from descant.models.compat.hf_caches.transformers_copy import from_transformers_cache
from descant.models.forward.cache_layers import KVPair

__all__ = ["EncoderDecoderCache"]


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

    def commit_store(self) -> KVCache:
        """Commit the pending forward and return the self-attention store."""
        return self.self_attention_cache.commit_store()

    def set_store(self, store: KVCache) -> None:
        """Replace the self-attention store."""
        self.self_attention_cache.set_store(store)

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

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """The number of positions that the decoder has read."""
        return self.self_attention_cache.get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed decoder token."""
        return self.self_attention_cache.get_query_offset(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """The number of keys that self-attention will see, and the position of the first."""
        return self.self_attention_cache.get_mask_sizes(query_length, layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:
        """The maximum number of decoder positions; None: no limit."""
        return self.self_attention_cache.get_max_cache_shape(layer_idx)

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
        pairs = past_key_values or ()
        own, cross = DynamicCache([pair[:2] for pair in pairs]), DynamicCache([pair[2:4] for pair in pairs])
        return cls(own, cross)

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:
        """Copies of each layer's self-attention tensors, then of its cross-attention tensors, if any."""
        own, cross = self.self_attention_cache.to_legacy_cache(), self.cross_attention_cache.to_legacy_cache()
        return tuple(pair + cross[layer] for layer, pair in enumerate(own)) if cross else own

    def __getitem__(self, layer_idx: int) -> Any:
        return (*self.self_attention_cache[layer_idx], *self.cross_attention_cache[layer_idx])

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))

    def __len__(self) -> int:
        return len(self.self_attention_cache)

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of the self-attention cache."""
        return self.self_attention_cache.layers

    @property
    def nbytes(self) -> int:
        """Bytes in use by both caches."""
        return sum(part.nbytes for part in (self.self_attention_cache, self.cross_attention_cache))

    @property
    def lengths(self) -> Tensor:
        """The number of decoder positions each row has read [R] (host)."""
        return self.self_attention_cache.lengths

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer of the self-attention cache, whether it drops what leaves its window."""
        return self.self_attention_cache.is_sliding

    @property
    def is_compileable(self) -> bool:
        """Whether the shapes of the self-attention cache are static."""
        return self.self_attention_cache.is_compileable


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
