"""Rows of caches: references to single ones, copies of them, and caches that show rows of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import (
    DraftLimitingCache,
    KVCache,
    KVSpan,
    MultiCache,
    ReadableCache,
    RowCache,
    SelectableCache,
    StateCache,
    VisibleSlots,
)
from descant.core.rows import stable_row_order
from descant.kv_cache.stores.block_store import StoreGroup


class CachedRow(NamedTuple):
    """One row of a cache; the cache must not change while the reference is in use."""

    store: KVCache
    row: int = 0

    @property
    def length(self) -> int:
        """The number of positions of the row."""
        return int(self.store.lengths[self.row])


def append_rows(cache: RowCache, cached_rows: Sequence[CachedRow | None]) -> None:
    """Append one row per entry to a cache, with the entry's content; None appends an empty row.

    Rows of the type of the cache, or of its inner cache, still share memory afterwards. Others are copied.
    """
    joinable = (type(cache), type(unwrap_cache(cache, torch.zeros(0, dtype=torch.long))[0]))
    stores = [None if cached is None else cached.store for cached in cached_rows]
    for _, group in groupby(range(len(cached_rows)), lambda index: id(stores[index])):
        indices = list(group)
        store = stores[indices[0]]
        if store is None:
            cache.extend(len(indices))
            continue
        rows = torch.tensor([cast(CachedRow, cached_rows[index]).row for index in indices])
        if type(store) in joinable and hasattr(cache, "join"):
            cache.join(store.select(rows))
        else:
            first = len(cache)
            cache.extend(len(indices))
            target, target_rows = unwrap_cache(cache, torch.arange(first, len(cache)))
            copy_rows(target, target_rows, store, rows)


def copy_rows(cache: KVCache, target_rows: Tensor, store: ReadableCache, rows: Tensor) -> None:
    """Copy rows of `store` to empty rows of `cache`, which may be of another type; call `commit` after."""
    size = int(store.lengths[rows].max())
    spans: dict[torch.device, KVSpan] = {}
    for layer, (key, value) in read_layers(store, rows).items():
        if key.device not in spans:
            spans[key.device] = KVSpan(target_rows.to(key.device), 0, size, size)
        cache.update(layer, key[:, :, :size], value[:, :, :size], spans[key.device])


def unwrap_cache(cache: RowCache, rows: Tensor) -> tuple[KVCache, Tensor]:
    """The innermost cache and the index of those rows in it; `PairedRowCache` stores rows elsewhere."""
    while isinstance(cache, RowView):
        rows, cache = cache.row_index[rows], cache.inner
    return cast(KVCache, cache), rows


def is_lossless(store: object) -> bool:
    """Whether a cache returns every position exactly as it was written."""
    return isinstance(store, ReadableCache) and store.max_rewind is None and store.exact_reads


def layer_indices(store: ReadableCache) -> Sequence[int]:
    """The layers that were written to a cache."""
    return sorted(store.layers)


def read_layers(store: ReadableCache, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer the keys and values [N, H, S, D] of rows, in order of position."""
    return {layer: store.read(layer, rows) for layer in layer_indices(store)}


def gather_rows(cached_rows: Sequence[CachedRow]) -> KVCache:
    """A cache with these rows in this order; their own cache where it has exactly these rows."""
    first = cached_rows[0].store
    if all(cached.store is first for cached in cached_rows):
        rows = [cached.row for cached in cached_rows]
        return first if rows == list(range(len(first))) else first.select(torch.tensor(rows))
    gathered = first.select(torch.zeros(0, dtype=torch.long))
    append_rows(gathered, cached_rows)
    return gathered


class RowView:
    """A cache whose row `i` is row `row_index[i]` of `inner`."""

    new_row: ClassVar[Mapping[str, int]] = {}  # what else is known of each row, and its first value

    def __init__(self, inner: RowCache, row_index: Tensor) -> None:
        self.inner = inner
        self.row_index = row_index[:0]  # [R] (host), as all columns
        for name in self.new_row:
            setattr(self, name, row_index[:0])
        self._append(row_index)

    @property
    def max_rewind(self) -> int | None:
        """The number of positions by which a row may be cut."""
        return self.inner.max_rewind

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have."""
        return self.inner.capacity

    def __len__(self) -> int:
        return len(self.row_index)

    def _append(self, row_index: Tensor) -> None:
        """Count new rows, which are these rows of the inner cache."""
        self.row_index = torch.cat((self.row_index, row_index))
        for name, value in self.new_row.items():
            setattr(self, name, torch.cat((getattr(self, name), torch.full((len(row_index),), value))))


def row_subset(cache: RowCache, row_index: Tensor) -> RowCache:
    """A view whose row `i` is row `row_index[i]` (host) of `cache`; `cache` itself for all rows in order."""
    cache, row_index = unwrap_cache(cache, row_index)
    if len(row_index) == len(cache) and torch.equal(row_index, torch.arange(len(row_index))):
        return cache
    return RowSubset(cache, row_index)


class RowSubset(RowView):
    """A cache for one forward that feeds only some rows, or all rows in another order.

    Reads and writes go to the underlying cache. Rows are moved only there.
    """

    def __init__(self, inner: RowCache, row_index: Tensor) -> None:
        super().__init__(inner, row_index)
        self._last_span: tuple[KVSpan, KVSpan] | None = None  # the last span, as given and as mapped

    @cached_property
    def parts(self) -> Sequence[RowCache]:
        """The same view of each part of a `MultiModelCache`."""
        return [row_subset(part, self.row_index) for part in cast(MultiCache, self.inner).parts]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> NoReturn:  # noqa: ARG002 - the interface
        """Not supported: rows move only in the underlying cache."""
        raise TypeError("RowSubset does not support commit: commit the underlying cache")

    def extend(self, rows: int) -> NoReturn:  # noqa: ARG002 - the interface
        """Not supported: rows are added only to the underlying cache."""
        raise TypeError("RowSubset does not support extend: extend the underlying cache")

    # -------------------------------------------------------------------- keys and values
    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the keys and values [N, H, S, D] of its rows."""
        return cast(KVCache, self.inner).update(layer, key, value, self._map_span(span))

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will return for this layer."""
        return cast(KVCache, self.inner).visible_slots(layer, self._map_span(span))

    def _map_span(self, span: KVSpan) -> KVSpan:
        """The span in rows of the underlying cache; one object for all layers, because caches key on it."""
        if self._last_span is None or self._last_span[0] is not span:
            row_index = self.row_index[span.on_host(len(self))[0]]
            rows = row_index if span.rows is None else row_index.to(span.rows.device, non_blocking=True)
            self._last_span = span, span._replace(rows=rows, host_rows=row_index)
        return self._last_span[1]

    # -------------------------------------------------------------------- state
    def state_lengths(self, lengths: Tensor) -> Tensor:
        """The positions that the state of each row has read [R] (host), at most `lengths` [R] (host)."""
        inner_lengths = torch.zeros(len(self.inner), dtype=torch.long)
        inner_lengths[self.row_index] = lengths
        return cast(StateCache, self.inner).state_lengths(inner_lengths)[self.row_index]

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """The rows that have a state (host), in as few batches as can share a forward."""
        subset_row = torch.full((len(self.inner),), -1)
        subset_row[self.row_index] = torch.arange(len(self.row_index))
        fed_lengths = None
        if lengths is not None:
            fed_lengths = torch.full((len(self.inner),), -1)
            fed_lengths[self.row_index] = lengths
        batches = [subset_row[batch] for batch in cast(StateCache, self.inner).row_batches(fed_lengths)]
        return [batch[batch >= 0].sort().values for batch in batches if bool((batch >= 0).any())]

    def read_state(self, rows: Tensor) -> Any:
        """The state of those rows (host), in that order; it must not be written to."""
        return cast(StateCache, self.inner).read_state(self.row_index[rows])

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Store the state of those rows (host) after a forward."""
        cast(StateCache, self.inner).write_state(self.row_index[rows], state, lengths)


_NO_LIMIT = 2**31


class PairedRowCache(RowView):
    """Conditional rows and their unconditional rows in one inner cache, so that one forward feeds both.

    Row `i` is inner row `row_index[i]`, its unconditional row is inner row `uncond_row[i]`, which was added
    when the row had `uncond_base[i]` positions. Once both are fed, the unconditional row is
    `uncond_offset[i]` positions longer (or shorter) than its row.
    """

    new_row: ClassVar[Mapping[str, int]] = {"uncond_row": -1, "uncond_offset": 0, "uncond_base": 0}
    uncond_row: Tensor  # -1: none
    uncond_offset: Tensor
    uncond_base: Tensor

    def __init__(self, inner: RowCache) -> None:
        super().__init__(inner, torch.arange(len(inner)))

    def max_drafts(self, rows: Tensor, pending: Tensor) -> Tensor:
        """The most drafts of these rows [N] (host), as their unconditional rows allow it too."""
        inner = self.inner
        if not isinstance(inner, DraftLimitingCache):
            return torch.full_like(pending, _NO_LIMIT)
        limit, uncond_row = inner.max_drafts(self.row_index[rows], pending), self.uncond_row[rows]
        paired = (uncond_row >= 0).nonzero().squeeze(1)
        limit[paired] = limit[paired].minimum(inner.max_drafts(uncond_row[paired], pending[paired]))
        return limit

    @property
    def outer_row(self) -> Tensor:
        """The row of each inner row [N]; -1 for unconditional rows."""
        outer_row = torch.full((len(self.inner),), -1)
        outer_row[self.row_index] = torch.arange(len(self.row_index))
        return outer_row

    def inner_order(self, guided: Tensor) -> Tensor | None:
        """For each inner row its index in `[rows; unconditional rows of guided]` [N]; None: the identity."""
        inner_rows = torch.cat((self.row_index, self.uncond_row[guided]))
        if torch.equal(inner_rows, torch.arange(len(inner_rows))):
            return None
        order = torch.empty_like(inner_rows)
        order[inner_rows] = torch.arange(len(inner_rows))
        return order

    def extend(self, rows: int) -> None:
        """Append empty rows without unconditional rows."""
        first = len(self.inner)
        self.inner.extend(rows)
        self._append(first + torch.arange(rows))

    def select(self, rows: Tensor) -> PairedRowCache:
        """A new cache with these rows [N] (host) and their unconditional rows; this one is unchanged."""
        paired = (self.uncond_row[rows] >= 0).nonzero().squeeze(1)
        inner_rows = torch.cat((self.row_index[rows], self.uncond_row[rows][paired]))
        other = PairedRowCache(cast(SelectableCache, self.inner).select(inner_rows))
        other.row_index, other.uncond_row = torch.arange(len(rows)), torch.full((len(rows),), -1)
        other.uncond_row[paired] = len(rows) + torch.arange(len(paired))
        other.uncond_offset, other.uncond_base = self.uncond_offset[rows], self.uncond_base[rows]
        return other

    def join(self, other: RowCache) -> None:
        """Append the rows of another cache, of this type or that of the inner cache, which is emptied."""
        first, first_inner = len(self), len(self.inner)
        added = other if isinstance(other, PairedRowCache) else PairedRowCache(other)
        cast(SelectableCache, self.inner).join(cast(SelectableCache, added.inner))
        self._append(added.row_index + first_inner)
        self.uncond_row[first:] = torch.where(added.uncond_row < 0, -1, added.uncond_row + first_inner)
        self.uncond_offset[first:], self.uncond_base[first:] = added.uncond_offset, added.uncond_base

    def add_uncond_rows(self, rows: Tensor, offsets: Tensor, lengths: Tensor | None = None) -> None:
        """Append an empty unconditional row for each of these rows, which have `lengths` [N] positions."""
        first = len(self.inner)
        self.inner.extend(len(rows))
        self.uncond_row[rows] = first + torch.arange(len(rows))
        self.uncond_offset[rows] = offsets
        self.uncond_base[rows] = torch.zeros_like(rows) if lengths is None else lengths

    def uncond_lengths(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The positions [N] of the unconditional rows of rows with `lengths` [N]; 0 before they are fed."""
        return torch.where(lengths > self.uncond_base[rows], lengths + self.uncond_offset[rows], 0)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; its unconditional row is cut alike."""
        parent_rows = torch.arange(len(self)) if parents is None else parents
        row_index, uncond_row = self.row_index[parent_rows], self.uncond_row[parent_rows]
        guided = (uncond_row >= 0).nonzero().squeeze(1)
        uncond_lengths = self.uncond_lengths(parent_rows[guided], lengths[guided])
        inner_parents = torch.cat((row_index, uncond_row[guided]))
        inner_lengths = torch.cat((lengths, uncond_lengths))
        if parents is None:
            lengths_by_row = torch.empty_like(inner_lengths)
            lengths_by_row[inner_parents] = inner_lengths
            self.inner.commit(None, lengths_by_row)
            return
        order = stable_row_order(inner_parents, len(self.inner))
        order = torch.arange(len(inner_parents)) if order is None else order
        new_index = torch.empty_like(order)
        new_index[order] = torch.arange(len(order))
        new_uncond_row = torch.full((len(parents),), -1)
        new_uncond_row[guided] = new_index[len(parents) :]
        offset, base = self.uncond_offset[parents], self.uncond_base[parents]
        self.inner.commit(inner_parents[order], inner_lengths[order])
        self.row_index, self.uncond_row = new_index[: len(parents)], new_uncond_row
        self.uncond_offset, self.uncond_base = offset, base


_UNTIED = -1


class TiedRowCache(RowView):
    """Rows of one sequence, all of the same length, on one or two rows of an inner cache.

    Row `i` reads inner row `row_index[i]`, and under guidance also `uncond_index[i]`. An inner row holds
    `prefix[i]` positions more than its rows: what was fed before their first token. New rows belong to no
    sequence until `tie` is called for them. An inner row is freed with the last of its rows.
    """

    new_row: ClassVar[Mapping[str, int]] = {"uncond_index": _UNTIED, "prefix": 0}
    uncond_index: Tensor  # -1: no guidance
    prefix: Tensor

    def __init__(self, inner: RowCache) -> None:
        super().__init__(inner, torch.zeros(0, dtype=torch.long))
        self._first: Tensor | None = None  # [N] a row of each inner row; None: not known, or rows are untied

    def extend(self, rows: int) -> None:
        """Append rows that belong to no sequence yet."""
        self._first = None
        self._append(torch.full((rows,), _UNTIED))

    @property
    def untied(self) -> list[int]:
        """The rows that belong to no sequence yet."""
        if self._first is not None:
            return []
        return [int(row) for row in np.flatnonzero(self.row_index.numpy() == _UNTIED)]

    def tie(self, rows: Sequence[int], prefix: int, is_guided: bool) -> None:
        """Make these rows those of a new sequence with an empty inner row, two under guidance."""
        index, first, self._first = torch.tensor(rows), len(self.inner), None
        self.inner.extend(2 if is_guided else 1)
        self.row_index[index] = first
        self.uncond_index[index] = first + 1 if is_guided else _UNTIED
        self.prefix[index] = prefix

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; inner rows follow the rows they serve."""
        if parents is None and self._first is not None:
            self.inner.commit(None, self._inner_lengths(lengths, self.prefix)[self._first])
            return
        row_index, uncond_index, prefix = self.row_index, self.uncond_index, self.prefix
        if parents is not None:
            row_index, uncond_index, prefix = row_index[parents], uncond_index[parents], prefix[parents]
        used, place = np.unique(torch.cat((row_index, uncond_index)).numpy(), return_index=True)
        first = torch.from_numpy(place[used >= 0] % max(1, len(row_index)))
        used = used[used >= 0]
        # Inner rows keep their order, so that those before the first one that is freed do not move.
        num_inner_rows = len(self.inner)
        is_whole = parents is None and len(used) == num_inner_rows
        inner_lengths = self._inner_lengths(lengths, prefix)[first]
        self.inner.commit(None if is_whole else torch.from_numpy(used), inner_lengths)
        # New rows may not have been fed yet: they are tied at their first forward.
        self._first = None if (row_index.numpy() == _UNTIED).any() else first
        if is_whole:
            return
        new_index = np.full(num_inner_rows + 1, _UNTIED)  # the last one is that of untied rows
        new_index[used] = np.arange(len(used))
        self.row_index = torch.from_numpy(new_index[row_index.numpy()])
        self.uncond_index = torch.from_numpy(new_index[uncond_index.numpy()])
        self.prefix = prefix

    @staticmethod
    def _inner_lengths(lengths: Tensor, prefix: Tensor) -> Tensor:
        """The positions of inner rows for those of rows: a row that was not fed has none."""
        return torch.where(lengths > 0, lengths + prefix, 0)


class MultiModelCache(StoreGroup):
    """One cache per model; every row operation is applied to all of them."""

    def __init__(self, parts: Sequence[RowCache]) -> None:
        self.parts = tuple(parts)
        super().__init__(self.parts)
