"""`Cache`: the transformers cache API over one of the KV stores, for forwards that users run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.kv_cache.attention.attention_proxy import with_queries
from descant.kv_cache.stores.block_store import largest
from descant.models.forward.cache_layers import (
    HFCacheLayer,
    KVPair,
    empty_layers,
    shift_right,
    to_tensor,
    with_grad,
)


class Cache(TransformersCache):
    """Base of the cache classes: a transformers cache whose keys and values are in a Descant store.

    A forward writes its layers one by one at a single span. The span stays pending until a layer is written a
    second time or the contents are read; then it is committed to the store. All rows of a forward have the
    same width, left padding included. If the rows of the store differ in length (after `generate`), they are
    shown aligned at the right, as in a left-padded batch.
    """

    def __init__(self, store: KVCache) -> None:
        # The base constructor would create layers; here the store holds them, so it is not called.
        self.offloading = False
        self.layer_class_to_replicate = None
        self.read_only = False  # True for caches that several calls share
        self._attach_store(store)

    # -------------------------------------------------------------------- store
    def commit_store(self) -> KVCache:
        """Commit the pending forward and return the store."""
        self._commit_pending()
        return self._store

    def set_store(self, store: KVCache) -> None:
        """Replace the store and drop the pending forward."""
        self._prepare_write()
        self._attach_store(store)

    def _attach_store(self, store: KVCache) -> None:
        self._store = store
        self._pending_span: KVSpan | None = None  # span of the forward in progress
        self._written_layers: set[int] = set()  # layers that this forward has written
        # Memo of `_next_span`: the lengths it was computed from, and the span.
        self._planned_span: tuple[Tensor, KVSpan] | None = None
        # [R] (host) left padding of the first forward, from `set_padding`.
        self._left_pads: Tensor | None = None
        # Shape and dtype of each layer, as an empty pair [1, H, 0, D].
        self._empty_layers: dict[int, KVPair] = {}
        # The layers of a store that was filled elsewhere are looked up on first use.
        self._has_unlisted_layers = bool(len(store)) and bool(store.lengths.any())

    def _prepare_write(self) -> None:
        """Raise if the cache is read-only; otherwise drop `tokens`, which no longer match the contents."""
        if self.read_only:
            must = "is read-only (frozen) and cannot be written"
            raise InputError("past_key_values", must, self, "write to its `copy()`")
        self.tokens: list[Tensor] | None = None

    def _commit_pending(self) -> None:
        """Commit the pending forward to the store."""
        if self._pending_span is not None:
            lengths = self.lengths
            self._pending_span, self._written_layers, self._left_pads = None, set(), None
            self._store.commit(None, lengths)

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Declare the left padding of the first forward by its attention mask [R, T]; it is not stored.

        Optional for caches that keep every position. Required for those that keep the first positions of a
        row (`SinkCache`), which would otherwise keep padding.
        """
        self._prepare_write()
        if self.get_seq_length():
            raise InputError("attention_mask", "must be set before the first forward", attention_mask)
        mask = attention_mask.bool().cpu()
        self._left_pads, self._planned_span = mask.shape[1] - mask.sum(1), None
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            raise InputError("attention_mask", "must have its padding at the left", attention_mask)
        return self

    def _next_span(self, width: int) -> KVSpan:
        """The span that a forward of `width` tokens will write."""
        lengths, planned = self._store.lengths, self._planned_span
        if planned is None or planned[0] is not lengths or planned[1].width != width:
            longest = largest(lengths)
            starts = None if bool((lengths == longest).all()) else lengths
            num_committed = None if self._left_pads is None else width - self._left_pads
            start = longest if starts is None else starts
            span = KVSpan(None, start, width, longest + width, None, starts, num_committed)
            planned = self._planned_span = lengths, span
        return planned[1]

    # -------------------------------------------------------------------- forward
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - passed by models for transformers 4
        *_: Any,
        **__: Any,
    ) -> KVPair:
        """Write one layer's new keys and values [R, H, T, D]; returns all visible ones [R, H, S, D]."""
        self._prepare_write()
        if layer_idx in self._written_layers:
            self._commit_pending()
        self._check_write(layer_idx, key_states, self._pending_span or self._next_span(key_states.shape[2]))
        span = self._pending_span = self._pending_span or self._begin_forward(key_states)
        self._empty_layers[layer_idx] = key_states[:1, :, :0].detach(), value_states[:1, :, :0].detach()
        self._written_layers.add(layer_idx)
        new = key_states.detach(), value_states.detach()
        if self._left_pads is not None:
            key, value = (shift_right(block, -self._left_pads) for block in new)
            self._store.update(layer_idx, key, value, span)
            return key_states, value_states
        visible = with_queries(self._store.update(layer_idx, *new, span), span.width)
        visible = (
            self._align_right(layer_idx, visible, span)
            if span.host_starts is not None
            else self._visible_kv(layer_idx, visible)
        )
        if key_states.requires_grad and torch.is_grad_enabled() and isinstance(visible[0], Tensor):
            first = self._visible_sizes(layer_idx, span)[2]
            visible = with_grad(visible[0], key_states, first), with_grad(visible[1], value_states, first)
        return visible

    def _check_write(self, layer: int, key: Tensor, span: KVSpan) -> None:
        """Raise if keys do not match the rows of the cache or the pending forward."""
        rows = len(self._store) or key.shape[0]
        if key.shape[0] != rows or key.shape[2] != span.width:
            must = f"must be of {rows} rows and {span.width} tokens, as in earlier writes"
            raise InputError("key_states", must, key, "`reset` the cache or create a new one")
        before = span.read_length - span.width
        if before and not self.has_layer(layer):
            must = f"must hold the {before} positions that the other layers hold"
            do = "an earlier forward was cut short: `reset` the cache and feed the text again"
            raise InputError("layer_idx", must, layer, do)
        self._check_capacity(layer, key, span)

    def _begin_forward(self, key: Tensor) -> KVSpan:
        """The span of a new forward; the first forward sets the number of rows."""
        if not len(self._store):
            self._store.extend(key.shape[0])
        return self._next_span(key.shape[2])

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:
        """Raise if the write exceeds the limits of this class; overridden by subclasses."""

    def _visible_kv(self, layer: int, visible: KVPair) -> KVPair:  # noqa: ARG002 - overridden
        """The keys and values that attention sees after a write."""
        return visible

    def _visible_sizes(self, layer: int, span: KVSpan) -> tuple[int, int, int]:
        """The number of visible slots, the position of the first, and the slot of the first new token."""
        before = span.read_length - span.width
        if self._left_pads is not None:
            return span.width, 0, 0
        slots = self._store.visible_slots(layer, span)
        if slots is None:
            return span.read_length, 0, before
        past = largest(slots.past_lengths)
        uniform = not isinstance(span.start, Tensor)
        return slots.num_slots if uniform else past + span.width, before - past, past

    def _align_right(self, layer: int, visible: KVPair, span: KVSpan) -> KVPair:
        """Rows of different length shifted to the right, as in a left-padded batch."""
        slots = self._store.visible_slots(layer, span)
        past = self._store.lengths if slots is None else slots.past_lengths
        longest = int(past.max())
        size = longest + span.width
        key, value = (shift_right(to_tensor(block)[:, :, :size], longest - past) for block in visible)
        return key, value

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """The number of positions a layer has read in the longest row, padding and evicted ones included."""
        span = self._pending_span if layer_idx in self._written_layers else None
        return largest(self._store.lengths) + (0 if span is None else span.width)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """The number of keys that attention will see, and the position of the first.

        Commits the pending forward if its layer is complete: models call this at the start of the next one.
        """
        width = query_length.shape[0] if isinstance(query_length, Tensor) else int(query_length)
        if self._pending_span is not None and layer_idx not in self._written_layers:
            return self._visible_sizes(layer_idx, self._pending_span)[:2]  # called in the middle of a forward
        self._commit_pending()
        return self._visible_sizes(layer_idx, self._next_span(width))[:2]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return Cache.get_seq_length(self, layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """The maximum number of positions; None: no limit."""
        return None

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """The number of cached positions that `new_seq_length` new ones will see beside them."""
        limit, length = self.get_max_cache_shape(layer_idx), self.get_seq_length(layer_idx)
        if limit is not None and length + new_seq_length > limit:
            return limit - new_seq_length
        return length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The maximum number of positions; -1: no limit (the transformers 5 convention)."""
        limit = self.get_max_cache_shape(layer_idx or 0)
        return -1 if limit is None else limit

    def _refuse_recurrent(self, *_: Any, **__: Any) -> Any:
        """Raise for recurrent layers, which keep more than keys and values."""
        do = "leave it out: the model then creates its own cache"
        raise InputError("past_key_values", "cannot hold the state of a recurrent layer", self, do)

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse_recurrent
    has_previous_state = update_indexer = _refuse_recurrent

    # -------------------------------------------------------------------- rows
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """New row `i` is old row `beam_idx[i]`."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows in this order; also takes a bool mask [R]."""
        self._select_rows(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies next to each other."""
        self._select_rows(torch.arange(len(self._store)).repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        self._prepare_write()
        store, rows = self.commit_store(), torch.as_tensor(rows).cpu().long()
        if not len(store):
            return
        rows = torch.where(rows < 0, rows + len(store), rows)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(store):
            raise InputError("indices", f"must be row indices of a cache of {len(store)} rows", rows.tolist())
        store.commit(rows, store.lengths[rows])

    def crop(self, max_length: int) -> None:
        """Truncate every row to `max_length` positions; a negative value removes that many, zero none."""
        self._prepare_write()
        store = self.commit_store()
        old = store.lengths
        # transformers 5 passes zero when there is nothing to remove; `reset` removes everything.
        new = (old + max_length).clamp(min=0) if max_length <= 0 else old.clamp(max=max_length)
        num_removed = int((old - new).max()) if len(old) else 0
        if store.max_rewind is not None and num_removed > store.max_rewind:
            must = f"can remove at most {store.max_rewind} positions of a {type(self).__name__}"
            raise InputError("max_length", must, max_length)
        if num_removed:
            store.commit(None, new)

    def reset(self) -> None:
        """Remove every row."""
        self._prepare_write()
        no_rows = torch.zeros(0, dtype=torch.long)
        self.commit_store().commit(no_rows, no_rows)

    def copy(self) -> Self:
        """A writable copy that shares no state with this cache."""
        return self._copy_rows(torch.arange(len(self._store)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def _copy_rows(self, rows: Tensor) -> Self:
        other = copy.copy(self)
        other.read_only = False
        other._attach_store(self.commit_store().select(rows))
        other._empty_layers, other._has_unlisted_layers = dict(self._empty_layers), self._has_unlisted_layers
        return other

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """Split into caches of `split_size` rows each."""
        num_rows = len(self.commit_store())
        if full_batch_size != num_rows:
            raise InputError("full_batch_size", f"must be {num_rows}, the rows of the cache", full_batch_size)
        starts = range(0, num_rows, split_size)
        return [self._copy_rows(torch.arange(start, min(start + split_size, num_rows))) for start in starts]

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """A new cache with the rows of several; the inputs are not changed."""
        if not splits:
            raise InputError("splits", "must contain at least one cache", splits)
        whole = splits[0].copy()
        for part in splits[1:]:
            store = part.commit_store()
            whole._store.join(store.select(torch.arange(len(store))))
        return whole

    # -------------------------------------------------------------------- reading
    def _read_layer(self, layer: int) -> KVPair:
        """Keys and values of a layer [R, H, S, D], shorter rows aligned at the right."""
        store = self.commit_store()
        span = self._next_span(0)
        key, value = (empty.expand(len(store), -1, -1, -1) for empty in self._empty_layers[layer])
        if not span.read_length:
            return key, value
        # A write of width 0 changes nothing and returns the contents.
        visible = store.update(layer, key, value, span)
        if isinstance(span.start, Tensor):
            return self._align_right(layer, visible, span)
        size = self._visible_sizes(layer, span)[2]
        return to_tensor(visible[0])[:, :, :size], to_tensor(visible[1])[:, :, :size]

    def _list_layers(self) -> dict[int, KVPair]:
        """Look up the layers of a store that was filled elsewhere, once; all layers as empty pairs."""
        if self._has_unlisted_layers:
            self._empty_layers = empty_layers(self._store) | self._empty_layers
            self._has_unlisted_layers = False
        return self._empty_layers

    def has_layer(self, layer: int) -> bool:
        """Whether a layer was written, by this cache or before the store was attached."""
        return layer in self._list_layers()

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers in the form that transformers expects; contents are read lazily."""
        return [HFCacheLayer(self, layer) for layer in range(len(self))]

    @property
    def key_cache(self) -> list[Tensor]:
        """Keys of every layer [R, H, S, D]; S is `max_cache_len` in a static cache."""
        return [pair[0] for pair in self._all_blocks()]

    @property
    def value_cache(self) -> list[Tensor]:
        """Values of every layer [R, H, S, D]; S is `max_cache_len` in a static cache."""
        return [pair[1] for pair in self._all_blocks()]

    def _all_blocks(self) -> list[KVPair]:
        """Keys and values of every layer."""
        return list(self)

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:
        """Copies of the keys and values of every layer, as tuples."""
        return tuple((key.clone(), value.clone()) for key, value in self)

    def write_layers(self, pairs: Sequence[Sequence[Tensor | None]]) -> Self:
        """Write whole layers [R, H, S, D]; layers without keys are skipped."""
        for layer, pair in enumerate(pairs):
            key, value = pair[:2]
            if key is not None and value is not None and key.numel():
                self.update(key, value, layer)
        self._commit_pending()
        return self

    def __getitem__(self, layer_idx: int) -> KVPair:
        if not 0 <= layer_idx < len(self):
            raise KeyError(f"layer {layer_idx}: the cache has {len(self)} layers")
        if not self.has_layer(layer_idx):
            return torch.empty(0), torch.empty(0)  # a layer without keys
        return self._read_layer(layer_idx)

    def __iter__(self) -> Iterator[KVPair]:
        return (self[layer] for layer in range(len(self)))

    def __len__(self) -> int:
        return max(self._list_layers(), default=-1) + 1

    def __bool__(self) -> bool:
        # Models test `if past_key_values` for the presence of a cache, also of an empty one.
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # -------------------------------------------------------------------- traits
    @property
    def nbytes(self) -> int:
        """Bytes in use. Commits the pending forward: stores evict and free memory at a commit."""
        return self.commit_store().nbytes

    @property
    def lengths(self) -> Tensor:
        """The number of positions each row has read [R] (host), the pending forward included."""
        if self._pending_span is None:
            return self._store.lengths
        width = self._pending_span.width
        return self._store.lengths + (width if self._left_pads is None else width - self._left_pads)

    @property
    def seen_tokens(self) -> int:
        """The number of positions the longest row has read."""
        return self.get_query_offset()

    @property
    def batch_size(self) -> int:
        """The number of rows, -1 before the first forward."""
        return len(self._store) or -1

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it drops what leaves its window."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, False: the store has keys and values only."""
        return [False] * len(self.is_sliding)

    is_dummy = is_linear

    @property
    def is_compileable(self) -> bool:
        """Whether shapes are static."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return len(self) > 0

    @property
    def is_croppable(self) -> bool:
        """Whether rows can be truncated to any length."""
        return self._store.max_rewind is None
