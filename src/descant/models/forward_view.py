"""Descant caches as transformers Cache objects, for the duration of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache

from descant.core.interfaces import KVCache, KVSpan
from descant.kv_cache.attention_proxy import with_queries
from descant.models.cross_attention_cache import CrossAttentionCache

__all__ = ["CrossAttentionView", "EncoderDecoderView", "SelfAttentionView"]


class SelfAttentionView(TransformersCache):
    """Self-attention keys and values: writes go to `store` at `span`, reads come from there."""

    def __init__(self, store: KVCache, span: KVSpan, sliding: Sequence[bool] = (False,)) -> None:
        # The base constructor would create layers; this view has none, so it is not called.
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self._store = store
        self._span = span
        self._is_sliding = sliding

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [N, H, T, D]; returns all visible ones [N, H, S, D]."""
        visible: tuple[Tensor, Tensor] = with_queries(
            self._store.update(layer_idx, key_states, value_states, self._span), key_states.shape[2]
        )
        return visible

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """The number of cached positions of the longest row."""
        return self._span.read_length - self._span.width

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """The number of keys that attention will see, and the position of the first.

        Used for rows of equal length only: visible slots count as the positions just before the fed ones.
        """
        span = self._span
        slots = self._store.visible_slots(layer_idx, span)
        if slots is None:
            return span.read_length, 0
        return slots.num_slots, span.read_length - span.width - int(slots.past_lengths[0])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return self.get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """No limit."""
        return -1

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        # Models test `if past_key_values` for the presence of a cache, also of an empty one.
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it has a window; models pick the layer for `get_mask_sizes` by it."""
        return list(self._is_sliding)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, False: the store has keys and values only."""
        return [False] * len(self._is_sliding)

    is_dummy = is_linear

    @property
    def is_compileable(self) -> bool:
        """False: transformers must not compile the forward."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True: the store allocates at the first write."""
        return True


class _CrossAttentionLayer:
    """One layer of a CrossAttentionCache, gathered for the fed rows on access."""

    def __init__(self, cache: CrossAttentionCache, layer: int, entries: Tensor | None) -> None:
        self._cross_cache, self._layer, self._entries = cache, layer, entries

    @property
    def keys(self) -> Tensor:
        return self._cross_cache.keys(self._layer, self._entries)

    @property
    def values(self) -> Tensor:
        return self._cross_cache.values(self._layer, self._entries)


class CrossAttentionView(SelfAttentionView):
    """Cross-attention keys and values, computed once per request and shared by its rows."""

    def __init__(
        self, cache: CrossAttentionCache, entries: Tensor | None, span: KVSpan, num_layers: int
    ) -> None:
        self.layers = [_CrossAttentionLayer(cache, layer, entries) for layer in range(num_layers)]
        self.offloading = False
        self.layer_class_to_replicate = None
        self._cross_cache = cache
        self._entries = entries
        self._span = span
        self._is_sliding = (False,)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the encoder's output at a request's first forward [B, H, S, D]."""
        self._cross_cache.write(layer_idx, key_states, value_states, self._entries)
        return key_states, value_states


class EncoderDecoderView(EncoderDecoderCache):
    """A self-attention and a cross-attention view, as encoder-decoder models expect."""

    def __init__(self, own: SelfAttentionView, cross: CrossAttentionView, num_layers: int) -> None:
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(num_layers), True)

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return int(self.self_attention_cache.get_query_offset(layer_idx))
