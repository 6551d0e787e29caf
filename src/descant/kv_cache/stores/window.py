"""The sliding-window cache: windowed layers keep only their window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.stores.block_store import Store
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.sink_window import SinkWindowBlocks, check_sizes

__all__ = ["WindowStore"]


class WindowStore(Store):
    """By layer all positions (window None), or the last `window - 1` and `slack` more.

    A query sees itself and the `window - 1` positions before it. A windowed layer has at most
    `window - 1 + slack + room` slots per row. A forward that feeds more than that is buffered until the
    commit. Rows may be cut by `slack` positions.
    """

    grows = False

    def __init__(self, windows: Sequence[int | None], slack: int = 64, room: int = 64) -> None:
        if not windows:
            raise InputError("windows", "must name a window or None for each layer", windows)
        if any(window is not None and window < 1 for window in windows):
            raise InputError("windows", "must be >= 1 where they are not None", windows)
        check_sizes(slack, room)
        self._windows, self._sizes = tuple(windows), (slack, room)
        # Windowed stores may refuse a cut, so they commit first, while nothing has changed yet.
        sizes = sorted({window for window in windows if window is not None})
        self._stores: dict[int | None, DenseStore | SinkWindowBlocks] = {
            window: SinkWindowBlocks(0, window - 1, slack, room) for window in sizes
        }
        self.max_rewind: int | None = slack if sizes else None
        self.is_padded = None in self._windows
        if self.is_padded:
            self._stores[None] = DenseStore()

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host), dropped ones included."""
        return next(iter(self._stores.values())).lengths

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(store.nbytes for store in self._stores.values())

    def _layer_store(self, layer: int) -> DenseStore | SinkWindowBlocks:
        """The store of a layer."""
        if layer >= len(self._windows):
            raise InputError("windows", f"must name a window or None for layer {layer} too", self._windows)
        return self._stores[self._windows[layer]]

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        for store in self._stores.values():
            store.extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`; slots outside the windows are dropped."""
        # All stores allocate before the first one changes.
        for commit in [store.prepare_commit(parents, lengths) for store in self._stores.values()]:
            commit()

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns at most `window - 1` slots before it, and the new ones."""
        return self._layer_store(layer).update(layer, key, value, span)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """The slots that `update` will return for this layer."""
        return self._layer_store(layer).visible_slots(layer, span)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        other = type(self)(self._windows, *self._sizes)
        other._stores = {window: store.select(rows) for window, store in self._stores.items()}
        return other

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(layer for store in self._stores.values() for layer in store.layers)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed slots of rows [N] (host) in a layer, packed; stale behind a row's end."""
        return self._layer_store(layer).read(layer, rows)

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        if other._windows != self._windows:
            raise InputError("other", f"must have the windows {self._windows}", other._windows)
        for window, store in self._stores.items():
            store.join(other._stores[window])  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for store in self._stores.values():
            store.to(device)

    def state(self) -> dict[str, Tensor]:
        """The committed content by window and layer."""
        return {
            f"{window or 'full'}.{name}": value
            for window, store in self._stores.items()
            for name, value in store.state().items()
        } | {"lengths": self.lengths.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store with the same settings."""
        for window, store in self._stores.items():
            prefix = f"{window or 'full'}."
            store.load(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
