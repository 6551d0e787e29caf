"""The offloaded caches: layers rest on another device than the model's, and come for their turn."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.static import StaticStore

__all__ = ["OffloadedStaticStore", "OffloadedStore"]

Device = torch.device | str


class _PrefetchedLayer(NamedTuple):
    """What the rows of a span hold in one layer, on the model's device [N, H, S, D]."""

    layer: int
    span: KVSpan
    keys: Tensor
    values: Tensor
    ready_event: Any = None  # the event after which they may be read; None: at once


class OffloadedStore(DenseStore):
    """A dense cache whose blocks rest on `device`; the model's device has two layers at the most.

    A layer's turn brings what its rows hold, and sends for the next layer meanwhile (on CUDA on a stream of
    its own, from pinned memory). What is written goes to both places at once, so that what is aboard can be
    forgotten and needs no way back. Commits move rows where they rest.
    """

    def __init__(self, device: Device = "cpu") -> None:
        super().__init__()
        self._init_offload(device)

    def _init_offload(self, device: Device) -> None:
        self._offload_device = torch.device(device)
        self._prefetched_layer: _PrefetchedLayer | None = None
        self._offload_span: tuple[KVSpan, KVSpan] | None = (
            None  # the span at hand, and as it is where the blocks rest
        )
        self._streams: dict[torch.device, Any] = {}
        self._compute_devices: dict[int, torch.device] = {}  # by layer, where the model computes it

    @property
    def nbytes(self) -> int:
        """What the blocks take in memory, and the layer that was sent for."""
        return super().nbytes + self.prefetched_bytes

    @property
    def prefetched_bytes(self) -> int:
        """What the layer that was sent for takes on the model's device."""
        return (
            0
            if self._prefetched_layer is None
            else self._prefetched_layer.keys.nbytes + self._prefetched_layer.values.nbytes
        )

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], on the device of the keys."""
        here = key.device
        if here == self._offload_device:
            return super().update(layer, key, value, span)
        self._compute_devices[layer] = here
        home = self._to_offload_span(span)
        if span.is_first_write:  # what is written is all there is
            super().update(layer, key.to(self._offload_device), value.to(self._offload_device), home)
            return key, value
        if not self._has_capacity(span):
            seen = super().update(layer, key.to(self._offload_device), value.to(self._offload_device), home)
            return seen[0].to(here), seen[1].to(here)
        for store, new in ((self._keys, key), (self._values, value)):
            self._ensure_capacity(store, layer, new, span.read_length)
        aboard = self._take_layer(layer, span, here)
        self.prefetch(layer + 1, span)
        self._write(aboard.keys, aboard.values, key, value, span)
        stowed = key.to(self._offload_device), value.to(self._offload_device)
        self._write(self._keys[layer], self._values[layer], *stowed, home)
        return aboard.keys[:, :, : span.read_length], aboard.values[:, :, : span.read_length]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.drop_prefetched()
        super().commit(parents, lengths)

    def drop_prefetched(self) -> None:
        """Let go of the layer that was sent for."""
        self._prefetched_layer = None

    def to(self, device: Device) -> None:
        """Let everything rest elsewhere."""
        self._offload_device, self._prefetched_layer, self._offload_span = torch.device(device), None, None
        super().to(device)

    def _has_capacity(self, span: KVSpan) -> bool:  # noqa: ARG002 - for those that do not grow
        """Whether there is a slot for everything that is written."""
        return True

    # -------------------------------------------------------------------- to and fro
    def _to_offload_span(self, span: KVSpan) -> KVSpan:
        """The span where the blocks rest, one for all layers."""
        if self._offload_span is None or self._offload_span[0] is not span:
            places, starts = (torch.from_numpy(one) for one in span.on_host(self._num_rows))
            rows = None if span.rows is None else places.to(self._offload_device)
            start = span.start if isinstance(span.start, int) else starts.to(self._offload_device)
            self._offload_span = (
                span,
                KVSpan(rows, start, span.width, span.read_length, span.host_rows, span.host_starts),
            )
        return self._offload_span[1]

    def _take_layer(self, layer: int, span: KVSpan, here: torch.device) -> _PrefetchedLayer:
        """The layer aboard, which was sent for or has to be fetched now; it is no longer held here."""
        ahead, self._prefetched_layer = self._prefetched_layer, None
        known = ahead is not None and ahead.layer == layer and ahead.span is span
        if ahead is None or not known or ahead.keys.device != here:
            return self._fetch_layer(layer, span, here)
        if ahead.ready_event is not None:
            stream = torch.cuda.current_stream(here)
            stream.wait_event(ahead.ready_event)
            for block in (ahead.keys, ahead.values):
                block.record_stream(stream)
        return ahead

    def prefetch(self, layer: int, span: KVSpan) -> None:
        """Begin to fetch a layer for that span, if it was ever written from elsewhere."""
        here = self._compute_devices.get(layer)
        if here is None or layer not in self._keys:
            return
        if here.type != "cuda":
            self._prefetched_layer = self._fetch_layer(layer, span, here)
            return
        stream = self._streams.get(here)
        if stream is None:
            stream = self._streams[here] = torch.cuda.Stream(here)
        with torch.cuda.stream(stream):
            found = self._fetch_layer(layer, span, here)
            self._prefetched_layer = found._replace(ready_event=stream.record_event())

    def _fetch_layer(self, layer: int, span: KVSpan, here: torch.device) -> _PrefetchedLayer:
        """The blocks of a span's rows, with room for what it writes, on the model's device."""
        rows = self._to_offload_span(span).rows
        found = []
        for store in (self._keys, self._values):
            block = self._ensure_capacity(store, layer, store[layer], span.read_length)
            if here.type == "cuda" and block.device.type == "cpu" and not block.is_pinned():
                block = store[layer] = block.pin_memory()
            # Whole lines, for only what is in one piece can be copied while something else goes on.
            lines = block[: self._num_rows] if rows is None else block[rows]
            found.append(lines.to(here, non_blocking=True))
        return _PrefetchedLayer(layer, span, *found)

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, span: KVSpan) -> None:
        """Write at a span into blocks: of its own rows, or of all rows where they rest."""
        aboard = keys.device != self._offload_device
        if isinstance(span.start, int) and (aboard or span.rows is None):
            slots = slice(span.start, span.start + span.width)
            keys[: len(key), :, slots], values[: len(key), :, slots] = key, value
            return
        rows, at = self._write_index(span, keys.device)
        if aboard:
            rows = torch.arange(len(key), device=keys.device)
        keys[rows[:, None], :, at] = key.transpose(1, 2)
        values[rows[:, None], :, at] = value.transpose(1, 2)

    # -------------------------------------------------------------------- blocks
    def _make_empty(self) -> Self:
        return type(self)(self._offload_device)

    def _prepare_block(self, block: Tensor) -> Tensor:
        return super()._prepare_block(block.to(self._offload_device))

    def _ensure_capacity(self, store: dict[int, Tensor], layer: int, like: Tensor, slots: int) -> Tensor:
        if like.device != self._offload_device:
            like = like.new_empty((0, like.shape[1], 0, like.shape[3]), device=self._offload_device)
        return super()._ensure_capacity(store, layer, like, slots)


class OffloadedStaticStore(OffloadedStore, StaticStore):
    """A static cache whose blocks rest on `device`."""

    def __init__(self, capacity: int, rows: int | None = None, device: Device = "cpu") -> None:
        StaticStore.__init__(self, capacity, rows)
        self._init_offload(device)

    def _has_capacity(self, span: KVSpan) -> bool:
        return span.read_length <= self.capacity

    def _make_empty(self) -> Self:
        return type(self)(self.capacity, self._max_rows, self._offload_device)
