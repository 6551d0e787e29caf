"""The interfaces of caches, and the records that say where a forward reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Array",
    "CacheWrapper",
    "DraftLimitingCache",
    "KVCache",
    "KVSpan",
    "MultiCache",
    "ReadableCache",
    "RowCache",
    "SelectableCache",
    "StateCache",
    "TransactionalCache",
    "VisibleSlots",
]

Array = np.ndarray[Any, np.dtype[Any]]  # on the host


class KVSpan(NamedTuple):
    """Where one forward writes: which rows, from which slot on, and how many slots it reads.

    A row's position is its slot. Rows of equal length share an `int` start and need no scatter.
    """

    rows: Tensor | None  # [N] on the device; None: every row, in order
    start: int | Tensor  # first slot written; [N] on the device for ragged rows
    width: int  # number of slots written
    read_length: int  # number of slots read
    host_rows: Tensor | None = None  # [N] `rows` on the host, where they are not all rows in order
    host_starts: Tensor | None = None  # [N] `start` on the host, where starts differ
    num_committed: Tensor | None = None  # [N] (host) written slots that are no drafts; None: unknown

    def on_host(self, rows: int) -> tuple[Array, Array]:
        """The rows, out of `rows` in all, and their starts [N]; no device sync if both are on the host."""
        index: Array = np.arange(rows)
        if self.rows is not None:
            index = (self.rows.cpu() if self.host_rows is None else self.host_rows).numpy()
        if isinstance(self.start, int):
            return index, np.full(len(index), self.start)
        return index, (self.start.cpu() if self.host_starts is None else self.host_starts).numpy()

    @property
    def is_first_write(self) -> bool:
        """Whether nothing lies before the written slots, so that attention reads only the new keys."""
        return isinstance(self.start, int) and self.start == 0


class VisibleSlots(NamedTuple):
    """The slots of a layer that a forward sees: those the rows hold, then those it writes.

    Query `j` of row `i` sees the slots below `past_lengths[i] + j + 1`; slots behind that are stale.
    """

    past_lengths: Tensor  # [N] (host) slots of each fed row before the write
    num_slots: int  # number of slots shown


class RowCache(Protocol):
    """A cache with one entry per row; how it is read and written is between it and the model."""

    @property
    def max_rewind(self) -> int | None:
        """How far below its longest length `commit` may cut a row; None: any length.

        Slots written since the last commit can always be cut.
        """
        ...

    @property
    def capacity(self) -> int | None:
        """The most positions a row can have; None: no limit."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """Make new row `i` old row `parents[i]` cut to `lengths[i]` (host): reorder, fork, roll back, evict.

        With `parents=None` every row keeps its index.
        """
        ...

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        ...


@runtime_checkable
class SelectableCache(RowCache, Protocol):
    """A cache whose rows can be copied out, and joined to another cache of its type."""

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), evicted ones included."""
        ...

    def select(self, rows: Tensor) -> Self:
        """A new cache with these rows [N] (host), as last committed; this one is unchanged."""
        ...

    def join(self, other: Self) -> None:
        """Append the rows of another cache of the same type, which must not be used afterwards."""
        ...


@runtime_checkable
class ReadableCache(Protocol):
    """Keys and values that can be read by position, and so copied to a cache of any type."""

    @property
    def max_rewind(self) -> int | None:
        """How far a row may be cut; None: any length."""
        ...

    @property
    def exact_reads(self) -> bool:
        """Whether `read` returns keys and values exactly as they were written."""
        ...

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host)."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """The layers that hold anything."""
        ...

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [N, H, S, D] of these rows (host), by position."""
        ...


@runtime_checkable
class KVCache(SelectableCache, ReadableCache, Protocol):
    """A cache of keys and values, slot by slot."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        ...

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; return the keys and values [N, H, S, D] of its rows."""
        ...

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will show; None: slot `p` is position `p`, up to `span.read_length`."""
        ...

    def to(self, device: torch.device | str) -> None:
        """Move all tensors to a device."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, as last committed; they share no memory with the cache."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned into an empty cache of the same type and settings."""
        ...


@runtime_checkable
class StateCache(SelectableCache, Protocol):
    """A cache of a model's own state objects, such as a recurrent state."""

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:
        """The rows that have a state, in as few batches as can share a forward (host).

        `lengths` [R] (host) is how many positions each row has read, -1 for rows that are not fed: what was
        written after that and never committed is dropped.
        """
        ...

    def read_state(self, rows: Tensor) -> Any:
        """The state of these rows (host), batched in that order; it must not be written to."""
        ...

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Store the state of these rows (host) after a forward, which has read `lengths` [N] positions.

        The committed state stays until a commit accepts the new one.
        """
        ...


@runtime_checkable
class TransactionalCache(RowCache, Protocol):
    """A cache whose commit can be prepared, so that several caches commit together or not at all."""

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        ...


@runtime_checkable
class DraftLimitingCache(Protocol):
    """A cache that changes stored positions at some commits, so that later drafts of a forward miss it."""

    def max_drafts(self, rows: Tensor, pending: Tensor) -> Tensor:
        """The most drafts of these rows [N] (host) behind `pending` [N] positions that read as one by one."""
        ...


@runtime_checkable
class CacheWrapper(RowCache, Protocol):
    """A cache around another that holds further rows, such as the unconditional rows of CFG."""

    @property
    def inner(self) -> RowCache:
        """The cache that is written to."""
        ...

    @property
    def row_index(self) -> Tensor:
        """The row of `inner` that each row of this cache is [R] (host)."""
        ...


@runtime_checkable
class MultiCache(RowCache, Protocol):
    """The caches of several models that are fed the same rows."""

    @property
    def parts(self) -> Sequence[RowCache]:
        """One cache per model."""
        ...
