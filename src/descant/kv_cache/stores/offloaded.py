"""Offloaded caches: blocks are stored on another device and fetched layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.static import StaticStore

__all__ = ["OffloadedStaticStore", "OffloadedStore"]

Device = torch.device | str


class _PrefetchedLayer(NamedTuple):
    """The blocks of a span's rows in one layer, copied to the compute device [N, H, S, D]."""

    layer: int
    span: KVSpan
    keys: Tensor
    values: Tensor
    ready_event: Any = None  # CUDA event of the copy; None: the copy is complete


class OffloadedStore(DenseStore):
    """A dense cache stored on `device`; the compute device holds at most two layers.

    `update` uses the fetched layer and prefetches the next one (on CUDA in a separate stream, from pinned
    memory). Writes go to both devices, so a fetched layer can be dropped without copying back. Commits move
    rows on the offload device.
    """

    def __init__(self, device: Device = "cpu", expected_length: int | None = None) -> None:
        super().__init__(expected_length)
        self._settings = device, expected_length
        self._init_offload(device)

    def _init_offload(self, device: Device) -> None:
        self._offload_device = torch.device(device)
        self._prefetched_layer: _PrefetchedLayer | None = None
        self._offload_span: tuple[KVSpan, KVSpan] | None = None  # the last span, as given and offloaded
        self._streams: dict[torch.device, Any] = {}
        self._compute_devices: dict[int, torch.device] = {}  # by layer

    @property
    def nbytes(self) -> int:
        """The memory of all blocks and of the prefetched layer in bytes."""
        return super().nbytes + self.prefetched_bytes

    @property
    def offload_device(self) -> torch.device:
        """The device on which all blocks are stored."""
        return self._offload_device

    @property
    def prefetched_bytes(self) -> int:
        """The memory of the prefetched layer on the compute device in bytes."""
        layer = self._prefetched_layer
        return 0 if layer is None else layer.keys.nbytes + layer.values.nbytes

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D] on the keys' device."""
        device = key.device
        if device == self._offload_device:
            return super().update(layer, key, value, span)
        self._compute_devices[layer] = device
        offloaded = key.to(self._offload_device), value.to(self._offload_device)
        if span.is_first_write:  # the new keys and values are everything there is to read
            self._write(layer, *offloaded, self._to_offload_span(span))
            return key, value
        if not self._has_capacity(span):
            keys, values = super().update(layer, *offloaded, self._to_offload_span(span))
            return keys.to(device), values.to(device)
        self._layer_blocks(layer, *offloaded, span.read_length)
        fetched = self._take_layer(layer, span, device)
        self.prefetch(layer + 1, span)
        self._write(layer, *offloaded, self._to_offload_span(span))
        for block, new in ((fetched.keys, key), (fetched.values, value)):
            if isinstance(span.start, int):
                block[: len(new), :, span.start : span.start + span.width] = new
            else:
                rows, (_, at) = torch.arange(len(new), device=device), self._write_index(span, device)
                block[rows[:, None], :, at] = new.transpose(1, 2)
        return fetched.keys[:, :, : span.read_length], fetched.values[:, :, : span.read_length]

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit on the offload device."""
        self.drop_prefetched()
        return super().prepare_commit(parents, lengths)

    def drop_prefetched(self) -> None:
        """Drop the prefetched layer."""
        self._prefetched_layer = None

    def to(self, device: Device) -> None:
        """Make `device` the offload device and move all blocks there."""
        self._offload_device, self._prefetched_layer, self._offload_span = torch.device(device), None, None
        super().to(device)

    def _has_capacity(self, span: KVSpan) -> bool:  # noqa: ARG002 - for subclasses
        """Whether blocks can hold all slots of the span."""
        return True

    # -------------------------------------------------------------------- transfers
    def _to_offload_span(self, span: KVSpan) -> KVSpan:
        """The span on the offload device; one object for all layers."""
        if self._offload_span is None or self._offload_span[0] is not span:
            host_rows, starts = (torch.from_numpy(column) for column in span.on_host(self._num_rows))
            rows = None if span.rows is None else host_rows.to(self._offload_device)
            start = span.start if isinstance(span.start, int) else starts.to(self._offload_device)
            self._offload_span = span, span._replace(rows=rows, start=start)
        return self._offload_span[1]

    def _take_layer(self, layer: int, span: KVSpan, device: torch.device) -> _PrefetchedLayer:
        """The layer on the compute device, prefetched or fetched now; ownership goes to the caller."""
        prefetched, self._prefetched_layer = self._prefetched_layer, None
        matches = prefetched is not None and prefetched.layer == layer and prefetched.span is span
        if prefetched is None or not matches or prefetched.keys.device != device:
            return self._fetch_layer(layer, span, device)
        if prefetched.ready_event is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(prefetched.ready_event)
            for block in (prefetched.keys, prefetched.values):
                block.record_stream(stream)
        return prefetched

    def prefetch(self, layer: int, span: KVSpan) -> None:
        """Start fetching a layer for a span; no-op unless another device has written the layer."""
        device = self._compute_devices.get(layer)
        if device is None or layer not in self._keys:
            return
        if device.type != "cuda":
            self._prefetched_layer = self._fetch_layer(layer, span, device)
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            fetched = self._fetch_layer(layer, span, device)
            self._prefetched_layer = fetched._replace(ready_event=stream.record_event())

    def _fetch_layer(self, layer: int, span: KVSpan, device: torch.device) -> _PrefetchedLayer:
        """The blocks of a span's rows on the compute device, with capacity for its write."""
        rows = self._to_offload_span(span).rows
        fetched = []
        self._layer_blocks(layer, self._keys[layer], self._values[layer], span.read_length)
        for blocks in (self._keys, self._values):
            block = blocks[layer]
            if device.type == "cuda" and block.device.type == "cpu" and not block.is_pinned():
                block = blocks[layer] = block.pin_memory()
            # Full rows, because only contiguous memory is copied asynchronously.
            selected = block[: self._num_rows] if rows is None else block[rows]
            fetched.append(selected.to(device, non_blocking=True))
        return _PrefetchedLayer(layer, span, *fetched)

    # -------------------------------------------------------------------- blocks
    def _make_empty(self) -> Self:
        other = super()._make_empty()
        other._offload_device = self._offload_device
        return other

    def _prepare_block(self, block: Tensor) -> Tensor:
        return super()._prepare_block(block.to(self._offload_device))

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        if like.device != self._offload_device:
            like = like[:0, :, :0].to(self._offload_device)
        return super()._grow_block(block, like, slots, rows)


class OffloadedStaticStore(OffloadedStore, StaticStore):
    """A static cache stored on `device`."""

    def __init__(self, capacity: int, rows: int | None = None, device: Device = "cpu") -> None:
        StaticStore.__init__(self, capacity, rows)
        self._settings = capacity, rows, device
        self._init_offload(device)

    def _has_capacity(self, span: KVSpan) -> bool:
        return span.read_length <= self.capacity
