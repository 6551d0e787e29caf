"""The windowed cache: layers that see a window keep no more than that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.sink_window import SinkWindowBlocks

__all__ = ["WindowStore"]


class WindowStore:
    """For each layer all positions (None), or the last that its window shows and `slack` more.

    A query sees itself and `window - 1` positions before it. A windowed layer takes
    `window - 1 + slack + room` slots a row at the most, however long the row; a forward that feeds more than
    that at once takes what it feeds besides, until it is committed. Rows may be cut by `slack` positions.
    """

    def __init__(self, windows: Sequence[int | None], slack: int = 64, room: int = 64) -> None:
        if not windows:
            raise InputError("windows", "must name a window or None for each layer", windows)
        if any(window is not None and window < 1 for window in windows):
            raise InputError("windows", "must be >= 1 where they are not None", windows)
        for name, value, least in (("slack", slack, 0), ("room", room, 1)):
            if value < least:
                raise InputError(name, f"must be >= {least}", value)
        self._init_args = tuple(windows), slack, room
        self._windows = tuple(windows)
        # Those that may refuse a cut come first, so that nothing has changed when one does.
        kinds = sorted({window for window in windows if window is not None})
        self._stores: dict[int | None, DenseStore | SinkWindowBlocks] = {
            window: SinkWindowBlocks(0, window - 1, slack, room) for window in kinds
        }
        self.max_rewind: int | None = slack if kinds else None
        if None in self._windows:
            self._stores[None] = DenseStore()

    def __len__(self) -> int:
        return len(self._any_store)

    @property
    def lengths(self) -> Tensor:
        """How many positions each row has [R] (host), those that it forgot included."""
        return self._any_store.lengths

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for part in self._stores.values())

    @property
    def _any_store(self) -> DenseStore | SinkWindowBlocks:
        return next(iter(self._stores.values()))

    def _layer_store(self, layer: int) -> DenseStore | SinkWindowBlocks:
        """The part that holds a layer."""
        if layer >= len(self._windows):
            raise InputError("windows", f"must name a window or None for layer {layer} too", self._windows)
        return self._stores[self._windows[layer]]

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        for part in self._stores.values():
            part.extend(rows)

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`, and what no window needs is forgotten."""
        for part in self._stores.values():
            part.commit(parents, lengths)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; at most `window - 1` slots before it, and that."""
        return self._layer_store(layer).update(layer, key, value, span)

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:
        """What `update` is about to show of that layer."""
        return self._layer_store(layer).visible_slots(layer, span)

    # -------------------------------------------------------------------- whole rows
    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        other = type(self)(*self._init_args)
        other._stores = {window: part.select(rows) for window, part in self._stores.items()}
        return other

    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(layer for part in self._stores.values() for layer in part.layers)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows [N] (host) hold of a layer as last committed, packed, stale behind a row's end."""
        return self._layer_store(layer).read(layer, rows)

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        if other._windows != self._windows:
            raise InputError("other", f"must have the windows {self._windows}", other._windows)
        for window, part in self._stores.items():
            part.join(other._stores[window])  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> None:
        """Move everything it holds."""
        for part in self._stores.values():
            part.to(device)

    def state(self) -> dict[str, Tensor]:
        """All that it holds, as last committed, by window and layer."""
        return {
            f"{window or 'full'}.{name}": value
            for window, part in self._stores.items()
            for name, value in part.state().items()
        } | {"lengths": self.lengths.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a cache that is made alike and holds nothing."""
        for window, part in self._stores.items():
            before = f"{window or 'full'}."
            part.load(
                {name.removeprefix(before): one for name, one in state.items() if name.startswith(before)}
            )
