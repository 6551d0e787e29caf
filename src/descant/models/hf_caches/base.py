"""A store of keys and values with the face of a transformers cache, for forwards that users run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from descant.core.interfaces import KVCache, KVSpan
from descant.errors import InputError
from descant.models.hf_caches.layers import (
    HFCacheLayer,
    KVPair,
    empty_layers,
    shift_right,
    to_tensor,
    with_grad,
)

__all__ = ["Cache"]


class Cache(TransformersCache):
    """What every cache here is: a transformers cache whose keys and values lie in a store of ours.

    A forward writes its layers one after another at one span; it counts as read when a layer comes round
    again, or when anybody asks. Rows of a forward stand level, pads at their left included. Where the rows
    of the store do not (after a `generate`), they are shown the way transformers pads them: at the right.
    """

    def __init__(self, store: KVCache) -> None:
        # The base builds layers of its own; here the store has them, so its constructor is not for us.
        self.offloading = False
        self.layer_class_to_replicate = None
        self.read_only = False  # a frozen cache is read and never written: it must outlive who uses it
        self._attach_store(store)

    # -------------------------------------------------------------------- store
    @property
    def store(self) -> KVCache:
        """Where keys and values lie, with all that was written read."""
        self._commit_pending()
        return self._store

    @store.setter
    def store(self, store: KVCache) -> None:
        self._prepare_write()
        self._attach_store(store)

    def _attach_store(self, store: KVCache) -> None:
        self._store = store
        self._pending_span: KVSpan | None = None  # of the forward that is going on
        self._written_layers: set[int] = set()  # layers that it has written
        self._planned_span: tuple[Tensor, KVSpan] | None = (
            None  # of the forward last asked about, after which lengths
        )
        self._left_pads: Tensor | None = (
            None  # [R] (host) at the left of the first forward, if they were told
        )
        self._cached_length_stats: tuple[Tensor, int, bool] | None = None
        self._has_foreign_layers = bool(len(store)) and bool(
            store.lengths.any()
        )  # others have written layers
        self._empty_layers: dict[int, KVPair] = {}  # of each layer [1, H, 0, D], which says how to ask for it

    def _prepare_write(self) -> None:
        """Refuse to change what is frozen; of what changes, the tokens are not known any more."""
        if self.read_only:
            raise InputError(
                "past_key_values", "is frozen and cannot be written to", self, "write to its `copy()`"
            )
        self.tokens: list[Tensor] | None = None

    def _commit_pending(self) -> None:
        """Count what the last forward has written as read."""
        if self._pending_span is not None:
            width: int | Tensor = self._pending_span.width
            if self._left_pads is not None:
                width, self._left_pads = width - self._left_pads, None
            self._pending_span, self._written_layers = None, set()
            self._store.commit(None, self._store.lengths + width)

    def set_padding(self, attention_mask: Tensor) -> Self:
        """Say which tokens of the first forward are padding at the left of rows, from its mask [R, T].

        They are then not kept at all. A cache that keeps everything need not be told; one that keeps the
        beginning of a row has to be, or it would keep padding.
        """
        self._prepare_write()
        if self.get_seq_length():
            raise InputError("attention_mask", "must be told before the first forward", attention_mask)
        mask = attention_mask.bool().cpu()
        self._left_pads, self._planned_span = mask.shape[1] - mask.sum(1), None
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            raise InputError("attention_mask", "must have its padding at the left", attention_mask)
        return self

    def _next_span(self, width: int) -> KVSpan:
        """Where a forward of so many tokens will write."""
        lengths, longest, level = self._length_stats()
        known = self._planned_span
        if known is None or known[0] is not lengths or known[1].width != width:
            starts = None if level else lengths
            sure = None if self._left_pads is None else width - self._left_pads
            start = longest if starts is None else starts
            known = self._planned_span = (
                lengths,
                KVSpan(None, start, width, longest + width, None, starts, sure),
            )
        return known[1]

    def _length_stats(self) -> tuple[Tensor, int, bool]:
        """How many positions rows have [R], the longest, and whether all have as many."""
        lengths = self._store.lengths
        if self._cached_length_stats is None or self._cached_length_stats[0] is not lengths:
            longest = int(lengths.max()) if len(lengths) else 0
            self._cached_length_stats = lengths, longest, bool((lengths == longest).all())
        return self._cached_length_stats

    # -------------------------------------------------------------------- forward
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - what older models told
        *_: Any,
        **__: Any,
    ) -> KVPair:
        """Write one layer's new keys and values [R, H, T, D]; all that its rows hold then [R, H, S, D]."""
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
        seen = self._store.update(layer_idx, *new, span)
        seen = (
            self._align_right(layer_idx, seen, span)
            if span.host_starts is not None
            else self._visible_kv(layer_idx, seen)
        )
        if key_states.requires_grad and torch.is_grad_enabled() and isinstance(seen[0], Tensor):
            at = self._visible_sizes(layer_idx, span)[2]
            seen = with_grad(seen[0], key_states, at), with_grad(seen[1], value_states, at)
        return seen

    def _check_write(self, layer: int, key: Tensor, span: KVSpan) -> None:
        """Refuse keys that do not go with the rows and the forward at hand, before anything is written."""
        rows = len(self._store) or key.shape[0]
        if key.shape[0] != rows or key.shape[2] != span.width:
            raise InputError(
                "key_states",
                f"must be of {rows} rows and {span.width} tokens, as what was written before",
                key,
                "a cache has rows of one kind: `reset` it, or begin another",
            )
        before = span.read_length - span.width
        if before and not self.has_layer(layer):
            must = f"must have read the {before} positions that others have"
            do = "a forward was cut short: `reset` the cache and read again"
            raise InputError("layer_idx", must, layer, do)
        self._check_capacity(layer, key, span)

    def _begin_forward(self, key: Tensor) -> KVSpan:
        """Where the forward that begins writes; the first one says how many rows there are."""
        if not len(self._store):
            self._store.extend(key.shape[0])
        return self._next_span(key.shape[2])

    def _check_capacity(self, layer: int, key: Tensor, span: KVSpan) -> None:
        """Refuse what this kind of cache has no room for."""

    def _visible_kv(self, layer: int, seen: KVPair) -> KVPair:  # noqa: ARG002 - for those that show more
        """What attention sees of a layer that was just written."""
        return seen

    def _visible_sizes(self, layer: int, span: KVSpan) -> tuple[int, int, int]:
        """How many slots a layer shows, the position of the first, and the slot of the first new one."""
        before = span.read_length - span.width
        if self._left_pads is not None:
            return span.width, 0, 0
        reach = self._store.visible_slots(layer, span)
        if reach is None:
            return span.read_length, 0, before
        held = int(reach.past_lengths.max()) if len(reach.past_lengths) else 0
        level = not isinstance(span.start, Tensor)
        return reach.num_slots if level else held + span.width, before - held, held

    def _align_right(self, layer: int, seen: KVPair, span: KVSpan) -> KVPair:
        """Rows of different length moved to the right, as a left-padded batch has them."""
        reach = self._store.visible_slots(layer, span)
        held = self._store.lengths if reach is None else reach.past_lengths
        longest = int(held.max())
        size = longest + span.width
        key, value = (shift_right(to_tensor(block)[:, :, :size], longest - held) for block in seen)
        return key, value

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """How many positions a layer has read, of the longest row, pads and what it forgot included."""
        longest = self._length_stats()[1]
        return longest + (
            self._pending_span.width
            if self._pending_span is not None and layer_idx in self._written_layers
            else 0
        )

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys attention will see, and the position of the first."""
        width = query_length.shape[0] if isinstance(query_length, Tensor) else int(query_length)
        if self._pending_span is not None and layer_idx not in self._written_layers:
            return self._visible_sizes(layer_idx, self._pending_span)[
                :2
            ]  # somebody asks in the middle of a forward
        self._commit_pending()
        return self._visible_sizes(layer_idx, self._next_span(width))[:2]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first fed token."""
        return self.get_seq_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:  # noqa: ARG002
        """How many positions it can hold; None: no limit."""
        return None

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """How many positions it can hold, -1 if there is no limit, as transformers 5 says it."""
        most = self.get_max_cache_shape(layer_idx or 0)
        return -1 if most is None else most

    def _refuse_recurrent(self, *_: Any, **__: Any) -> Any:
        """Refuse a layer that keeps more than keys and values."""
        do = "leave it out, and the model makes its own"
        raise InputError("past_key_values", "cannot hold what a recurrent layer remembers", self, do)

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse_recurrent
    has_previous_state = update_indexer = _refuse_recurrent

    # -------------------------------------------------------------------- rows
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """New row `i` is old row `beam_idx[i]`."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a mask of rows [R] will do."""
        self._select_rows(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, beside itself."""
        self._select_rows(torch.arange(len(self.store)).repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        self._prepare_write()
        store, rows = self.store, torch.as_tensor(rows).cpu().long()
        if not len(store):
            return  # nothing was read: there are no rows to move
        rows = torch.where(rows < 0, rows + len(store), rows)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(store):
            raise InputError("indices", f"must be rows of a cache of {len(store)}", rows.tolist())
        store.commit(rows, store.lengths[rows])

    def crop(self, max_length: int) -> None:
        """Cut every row to this many positions; below zero: take so many off its end, and at zero nothing."""
        self._prepare_write()
        store = self.store
        old = store.lengths
        # Zero is what transformers 5 says when there is nothing to take off; `reset` is for everything.
        new = (old + max_length).clamp(min=0) if max_length <= 0 else old.clamp(max=max_length)
        cut = int((old - new).max()) if len(old) else 0
        if store.max_rewind is not None and cut > store.max_rewind:
            raise InputError(
                "max_length",
                f"can take back {store.max_rewind} positions of a {type(self).__name__}",
                max_length,
            )
        if cut:
            store.commit(None, new)

    def reset(self) -> None:
        """Forget every row."""
        self._prepare_write()
        none = torch.zeros(0, dtype=torch.long)
        self.store.commit(none, none)

    def copy(self) -> Self:
        """Another cache with the same rows, which can be written to without this one changing."""
        return self._copy_rows(torch.arange(len(self.store)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def _copy_rows(self, rows: Tensor) -> Self:
        other = copy.copy(self)
        other.read_only = False
        other._attach_store(self.store.select(rows))
        other._empty_layers, other._has_foreign_layers = dict(self._empty_layers), self._has_foreign_layers
        return other

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """Caches of so many rows each."""
        if full_batch_size != len(self.store):
            raise InputError("full_batch_size", f"must be the {len(self.store)} rows it has", full_batch_size)
        starts = range(0, full_batch_size, split_size)
        return [self._copy_rows(torch.arange(at, min(at + split_size, full_batch_size))) for at in starts]

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """One cache of the rows of several, which stay as they are."""
        if not splits:
            raise InputError("splits", "must be caches, one or more", splits)
        whole = splits[0].copy()
        for one in splits[1:]:
            whole._store.join(one.store.select(torch.arange(len(one.store))))
        return whole

    # -------------------------------------------------------------------- reading
    def _read_layer(self, layer: int) -> KVPair:
        """What the rows hold of a layer [R, H, S, D], the shorter ones at the right."""
        store = self.store
        span = self._next_span(0)
        key, value = (one.expand(len(store), -1, -1, -1) for one in self._empty_layers[layer])
        if not span.read_length:
            return key, value
        seen = store.update(layer, key, value, span)
        if isinstance(span.start, Tensor):
            return self._align_right(layer, seen, span)
        size = self._visible_sizes(layer, span)[2]
        return to_tensor(seen[0])[:, :, :size], to_tensor(seen[1])[:, :, :size]

    def has_layer(self, layer: int) -> bool:
        """Whether a layer was written, by this cache or by others before."""
        if self._has_foreign_layers:
            self._empty_layers, self._has_foreign_layers = (
                empty_layers(self._store) | self._empty_layers,
                False,
            )
        return layer in self._empty_layers

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """Its layers as transformers looks at them; what they hold is read when it is asked for."""
        return [HFCacheLayer(self, layer) for layer in range(len(self))]

    @property
    def key_cache(self) -> list[Tensor]:
        """Keys of every layer [R, H, S, D]."""
        return [self[layer][0] for layer in range(len(self))]

    @property
    def value_cache(self) -> list[Tensor]:
        """Values of every layer [R, H, S, D]."""
        return [self[layer][1] for layer in range(len(self))]

    def to_legacy_cache(self) -> tuple[tuple[Tensor, ...], ...]:
        """Keys and values of every layer as tuples, copied."""
        return tuple((key.clone(), value.clone()) for key, value in self)

    def write_layers(self, pairs: Sequence[Sequence[Tensor | None]]) -> Self:
        """Write whole layers [R, H, S, D]; layers without keys are left out."""
        for layer, pair in enumerate(pairs):
            key, value = pair[:2]
            if key is not None and value is not None and key.numel():
                self.update(key, value, layer)
        self._commit_pending()
        return self

    def __getitem__(self, layer_idx: int) -> KVPair:
        if not 0 <= layer_idx < len(self):
            raise KeyError(f"layer {layer_idx}: the cache has {len(self)}")
        if not self.has_layer(layer_idx):
            return torch.empty(0), torch.empty(0)  # a layer without keys
        return self._read_layer(layer_idx)

    def __iter__(self) -> Iterator[KVPair]:
        return (self[layer] for layer in range(len(self)))

    def __len__(self) -> int:
        self.has_layer(0)  # now it is known which there are
        return max(self._empty_layers, default=-1) + 1

    def __bool__(self) -> bool:
        # Models ask whether there is a cache at all by asking whether it is true.
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # -------------------------------------------------------------------- facts
    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.store.nbytes

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has read [R] (host)."""
        return self.store.lengths

    @property
    def seen_tokens(self) -> int:
        """How many positions the longest row has read."""
        return self.get_seq_length()

    @property
    def batch_size(self) -> int:
        """How many rows it has, -1 before the first forward."""
        return len(self._store) or -1

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers forget what has left their window."""
        return [False] * len(self)

    @property
    def is_compileable(self) -> bool:
        """Whether its shapes never change."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return len(self) > 0

    @property
    def is_croppable(self) -> bool:
        """Whether rows can be cut to any length."""
        return self._store.max_rewind is None
