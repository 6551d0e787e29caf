"""The offloaded caches: layers rest on another device than the model's, and come for their turn."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from descant.core.interfaces import Span
from descant.kv_cache.dense import DenseCache
from descant.kv_cache.static import StaticStore

__all__ = ["OffloadedStaticStore", "OffloadedStore"]

Device = torch.device | str


class _Aboard(NamedTuple):
    """What the rows of a span hold in one layer, on the model's device [N, H, S, D]."""

    layer: int
    span: Span
    keys: Tensor
    values: Tensor
    arrived: Any = None  # the event after which they may be read; None: at once


class OffloadedStore(DenseCache):
    """A dense cache whose blocks rest on `device`; the model's device has two layers at the most.

    A layer's turn brings what its rows hold, and sends for the next layer meanwhile (on CUDA on a stream of
    its own, from pinned memory). What is written goes to both places at once, so that what is aboard can be
    forgotten and needs no way back. Commits move rows where they rest.
    """

    def __init__(self, device: Device = "cpu") -> None:
        super().__init__()
        self._settle(device)

    def _settle(self, device: Device) -> None:
        self._rest = torch.device(device)
        self._ahead: _Aboard | None = None
        self._home: tuple[Span, Span] | None = None  # the span at hand, and as it is where the blocks rest
        self._streams: dict[torch.device, Any] = {}
        self._wanted: dict[int, torch.device] = {}  # by layer, where the model computes it

    @property
    def nbytes(self) -> int:
        """What the blocks take in memory, and the layer that was sent for."""
        return super().nbytes + self.aboard

    @property
    def aboard(self) -> int:
        """What the layer that was sent for takes on the model's device."""
        return 0 if self._ahead is None else self._ahead.keys.nbytes + self._ahead.values.nbytes

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], on the device of the keys."""
        here = key.device
        if here == self._rest:
            return super().update(layer, key, value, span)
        self._wanted[layer] = here
        home = self._at_rest(span)
        if span.fresh:  # what is written is all there is
            super().update(layer, key.to(self._rest), value.to(self._rest), home)
            return key, value
        if not self._fits(span):
            seen = super().update(layer, key.to(self._rest), value.to(self._rest), home)
            return seen[0].to(here), seen[1].to(here)
        for store, new in ((self._keys, key), (self._values, value)):
            self._room(store, layer, new, span.stop)
        aboard = self._taken(layer, span, here)
        self.prefetch(layer + 1, span)
        self._write(aboard.keys, aboard.values, key, value, span)
        stowed = key.to(self._rest), value.to(self._rest)
        self._write(self._keys[layer], self._values[layer], *stowed, home)
        return aboard.keys[:, :, : span.stop], aboard.values[:, :, : span.stop]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.evict()
        super().commit(parents, lengths)

    def evict(self) -> None:
        """Let go of the layer that was sent for."""
        self._ahead = None

    def to(self, device: Device) -> None:
        """Let everything rest elsewhere."""
        self._rest, self._ahead, self._home = torch.device(device), None, None
        super().to(device)

    def _fits(self, span: Span) -> bool:  # noqa: ARG002 - for those that do not grow
        """Whether there is a slot for everything that is written."""
        return True

    # -------------------------------------------------------------------- to and fro
    def _at_rest(self, span: Span) -> Span:
        """The span where the blocks rest, one for all layers."""
        if self._home is None or self._home[0] is not span:
            places, starts = (torch.from_numpy(one) for one in span.on_host(self._rows))
            rows = None if span.rows is None else places.to(self._rest)
            start = span.start if isinstance(span.start, int) else starts.to(self._rest)
            self._home = span, Span(rows, start, span.width, span.stop, span.places, span.starts)
        return self._home[1]

    def _taken(self, layer: int, span: Span, here: torch.device) -> _Aboard:
        """The layer aboard, which was sent for or has to be fetched now; it is no longer held here."""
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead.layer == layer and ahead.span is span
        if ahead is None or not known or ahead.keys.device != here:
            return self._fetched(layer, span, here)
        if ahead.arrived is not None:
            stream = torch.cuda.current_stream(here)
            stream.wait_event(ahead.arrived)
            for block in (ahead.keys, ahead.values):
                block.record_stream(stream)
        return ahead

    def prefetch(self, layer: int, span: Span) -> None:
        """Begin to fetch a layer for that span, if it was ever written from elsewhere."""
        here = self._wanted.get(layer)
        if here is None or layer not in self._keys:
            return
        if here.type != "cuda":
            self._ahead = self._fetched(layer, span, here)
            return
        stream = self._streams.get(here)
        if stream is None:
            stream = self._streams[here] = torch.cuda.Stream(here)
        with torch.cuda.stream(stream):
            found = self._fetched(layer, span, here)
            self._ahead = found._replace(arrived=stream.record_event())

    def _fetched(self, layer: int, span: Span, here: torch.device) -> _Aboard:
        """The blocks of a span's rows, with room for what it writes, on the model's device."""
        rows = self._at_rest(span).rows
        found = []
        for store in (self._keys, self._values):
            block = self._room(store, layer, store[layer], span.stop)
            if here.type == "cuda" and block.device.type == "cpu" and not block.is_pinned():
                block = store[layer] = block.pin_memory()
            # Whole lines, for only what is in one piece can be copied while something else goes on.
            lines = block[: self._rows] if rows is None else block[rows]
            found.append(lines.to(here, non_blocking=True))
        return _Aboard(layer, span, *found)

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, span: Span) -> None:
        """Write at a span into blocks: of its own rows, or of all rows where they rest."""
        aboard = keys.device != self._rest
        if isinstance(span.start, int) and (aboard or span.rows is None):
            slots = slice(span.start, span.start + span.width)
            keys[: len(key), :, slots], values[: len(key), :, slots] = key, value
            return
        rows, at = self._places(span, keys.device)
        if aboard:
            rows = torch.arange(len(key), device=keys.device)
        keys[rows[:, None], :, at] = key.transpose(1, 2)
        values[rows[:, None], :, at] = value.transpose(1, 2)

    # -------------------------------------------------------------------- blocks
    def _empty(self) -> Self:
        return type(self)(self._rest)

    def _kept(self, block: Tensor) -> Tensor:
        return super()._kept(block.to(self._rest))

    def _room(self, store: dict[int, Tensor], layer: int, like: Tensor, slots: int) -> Tensor:
        if like.device != self._rest:
            like = like.new_empty((0, like.shape[1], 0, like.shape[3]), device=self._rest)
        return super()._room(store, layer, like, slots)


class OffloadedStaticStore(OffloadedStore, StaticStore):
    """A static cache whose blocks rest on `device`."""

    def __init__(self, capacity: int, rows: int | None = None, device: Device = "cpu") -> None:
        StaticStore.__init__(self, capacity, rows)
        self._settle(device)

    def _fits(self, span: Span) -> bool:
        return span.stop <= self.capacity

    def _empty(self) -> Self:
        return type(self)(self.capacity, self._most, self._rest)
