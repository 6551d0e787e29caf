"""A cache of ours as a transformers model sees it during one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache

from descant.core.interfaces import KVCache, KVSpan
from descant.models.cross_attention_cache import CrossAttentionCache

__all__ = ["CrossAttentionView", "EncoderDecoderView", "SelfAttentionView"]


class SelfAttentionView(TransformersCache):
    """Self-attention keys and values: writes go to `store` at `span`, reads come from there."""

    def __init__(self, store: KVCache, span: KVSpan, sliding: Sequence[bool] = (False,)) -> None:
        # The base builds layers of its own; this view has none, so its constructor is not for us.
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self._store = store
        self._span = span
        self._is_sliding = sliding

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [N, H, T, D]; everything its rows hold [N, H, S, D]."""
        return self._store.update(layer_idx, key_states, value_states, self._span)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:  # noqa: ARG002
        """How many positions come before the fed ones, of the longest row."""
        return self._span.read_length - self._span.width

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """How many keys attention will see, and the position of the first.

        Asked of rows that stand level: what a row has kept counts as the positions just before the fed ones.
        """
        span = self._span
        reach = self._store.visible_slots(layer_idx, span)
        if reach is None:
            return span.read_length, 0
        return reach.num_slots, span.read_length - span.width - int(reach.past_lengths[0])

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
        # Models ask whether there is a cache at all by asking whether it is true.
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers see no further than a window: by these a model finds a layer to ask about."""
        return list(self._is_sliding)

    @property
    def is_compileable(self) -> bool:
        """Never compiled by the model itself."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Always ready."""
        return True


class _CrossAttentionLayer:
    """One layer of cross-attention memory, read for the fed rows only when it is asked for."""

    def __init__(self, memory: CrossAttentionCache, layer: int, lines: Tensor | None) -> None:
        self._cross_cache, self._layer, self._entries = memory, layer, lines

    @property
    def keys(self) -> Tensor:
        return self._cross_cache.keys(self._layer, self._entries)

    @property
    def values(self) -> Tensor:
        return self._cross_cache.values(self._layer, self._entries)


class CrossAttentionView(SelfAttentionView):
    """Cross-attention keys and values: computed once a request, shared by all its rows."""

    def __init__(self, memory: CrossAttentionCache, lines: Tensor | None, span: KVSpan, depth: int) -> None:
        self.layers = [_CrossAttentionLayer(memory, layer, lines) for layer in range(depth)]
        self.offloading = False
        self.layer_class_to_replicate = None
        self._cross_cache = memory
        self._entries = lines
        self._span = span
        self._is_sliding = (False,)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what the model made of the encoder's output at a request's first forward [B, H, S, D]."""
        self._cross_cache.write(layer_idx, key_states, value_states, self._entries)
        return key_states, value_states


class EncoderDecoderView(EncoderDecoderCache):
    """Both together, as encoder-decoder models want them."""

    def __init__(self, own: SelfAttentionView, cross: CrossAttentionView, depth: int) -> None:
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(depth), True)

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return int(self.self_attention_cache.get_query_offset(layer_idx))
