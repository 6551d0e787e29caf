"""Stores of one contiguous block per layer: dense and growing, of fixed size, or kept on another device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import KVSpan, VisibleSlots
from descant.errors import InputError, NotEnoughMemory, format_bytes
from descant.kv_cache.attention.packed_span import PackedGroup, PackedSpan
from descant.kv_cache.stores.block_store import BlockStore, Workload, largest, write_slots

# Blocks grow by an eighth, and at least by so many slots: attention reads the whole block in every step, so
# an occasional copy is cheap.
_MIN_GROWTH = 16
# Where so few slots are missing to the expected length, blocks grow to it at once.
_LAST_GROWTH = 64


class DenseStore(BlockStore):
    """Keys and values [R, H, S, D] per layer; position `p` of a row is its slot `p`.

    Rows with a common ancestor already hold the same prefix, so only the slots after it are copied: beam
    search never copies the prompt. Blocks do not grow beyond `expected_length` slots unless a row does.
    """

    is_padded = True

    def __init__(self, expected_length: int | None = None) -> None:
        super().__init__(expected_length)
        self._expected_length = expected_length
        self._marked_span: KVSpan | None = None  # the last span that was marked as written
        self._index_by_device: dict[torch.device, tuple[KVSpan, Tensor, Tensor]] = {}

    def count_slots(self, workload: Workload) -> int | None:
        """The slots of the rows of a workload; None: not known without running it."""
        return workload.num_fed * workload.final_length

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        keys, values = self._write(layer, key, value, span)
        stop = span.read_length
        if span.rows is None:
            return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
        if span.is_first_write:
            return key, value
        rows = self._write_index(span, key.device)[0]
        return keys[rows, :, :stop], values[rows, :, :stop]

    def _write(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; the blocks of the layer, without rows that are not in use."""
        if span is not self._marked_span:
            self._mark_written(span)
        keys, values = self._layer_blocks(layer, key, value, span.read_length)
        if keys.shape[0] != self._num_rows or values.shape[0] != self._num_rows:
            keys, values = keys.narrow(0, 0, self._num_rows), values.narrow(0, 0, self._num_rows)
        if span.rows is None and isinstance(span.start, int):
            # `narrow` takes half the time of a subscript.
            keys.narrow(2, span.start, span.width).copy_(key)
            values.narrow(2, span.start, span.width).copy_(value)
        else:
            write_slots((keys, values), (key, value), *self._write_index(span, key.device))
        return keys, values

    def write_packed(self, layer: int, key: Tensor, value: Tensor, span: PackedSpan) -> None:
        """Write the keys and values [1, H, P, D] of the tokens of several rows."""
        keys, values = self.blocks_for_write(layer, key, value, span)
        if span.rectangle is not None:
            rows, slots = span.rectangle
            shape = rows.stop - rows.start, slots.stop - slots.start
            keys[rows, :, slots] = key[0].unflatten(1, shape).transpose(0, 1)
            values[rows, :, slots] = value[0].unflatten(1, shape).transpose(0, 1)
            return
        index = span.memo.get(key.device)
        if index is None:
            host = torch.from_numpy(np.stack((span.rows[span.token_rows], span.positions)))
            index = span.memo[key.device] = host.to(key.device, non_blocking=True).unbind(0)
        keys[index[0], :, index[1]] = key[0].transpose(0, 1)
        values[index[0], :, index[1]] = value[0].transpose(0, 1)

    def blocks_for_write(
        self, layer: int, key: Tensor, value: Tensor, span: PackedSpan
    ) -> tuple[Tensor, Tensor]:
        """The blocks [R, H, S, D] of a layer, with room for keys and values that are written to them next."""
        if "is_marked" not in span.memo:
            self._written.mark(span.rows, span.starts + span.widths)
            span.memo["is_marked"] = True
        return self._layer_blocks(layer, key, value, span.read_length)

    def read_group(self, layer: int, group: PackedGroup) -> tuple[Tensor, Tensor]:
        """The keys and values [G, H, S, D] of a group of rows; a view if they are consecutive."""
        keys, values, stop = self._keys[layer], self._values[layer], group.num_slots
        first, count = int(group.rows[0]), len(group.rows)
        if int(group.rows[-1]) - first == count - 1 and "is_scattered" not in group.memo:
            if count < 3 or bool((np.diff(group.rows) == 1).all()):
                return keys[first : first + count, :, :stop], values[first : first + count, :, :stop]
            group.memo["is_scattered"] = True
        if keys.device not in group.memo:
            group.memo[keys.device] = torch.from_numpy(group.rows).to(keys.device, non_blocking=True)
        rows = group.memo[keys.device]
        return keys[:, :, :stop].index_select(0, rows), values[:, :, :stop].index_select(0, rows)

    def _layer_blocks(self, layer: int, key: Tensor, value: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """The layer's blocks, with capacity for all rows and so many slots."""
        keys, values = self._keys.get(layer), self._values.get(layer)
        if (
            keys is None
            or values is None
            or min(keys.shape[2], values.shape[2]) < slots
            or min(keys.shape[0], values.shape[0]) < self._num_rows
        ):
            return self._ensure_capacity(layer, (key, value), slots, self._num_rows)
        return keys, values

    def _mark_written(self, span: KVSpan) -> None:
        """Note which slots a forward writes; once for all layers."""
        if span.rows is None and isinstance(span.start, int):
            self._written.mark_first(self._num_rows, span.start + span.width)
        else:
            rows, starts = span.on_host(self._num_rows)
            self._written.mark(rows, starts + span.width)
        self._marked_span = span

    def _write_index(self, span: KVSpan, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [N] and slots [N, T] of a span on a device, computed once per forward and device."""
        cached = self._index_by_device.get(device)
        if cached is None or cached[0] is not span:
            rows = (
                torch.arange(self._num_rows, device=device)
                if span.rows is None
                else span.rows.to(device, non_blocking=True)
            )
            slots = torch.arange(span.width, device=device)
            start = span.start
            if isinstance(start, Tensor):
                start = start.to(device, non_blocking=True)[:, None]
            cached = self._index_by_device[device] = (span, rows, slots + start)
        return cached[1:]

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        self._check_room(len(lengths), lengths)
        if parents is None:
            return partial(self._set_rows, None, lengths)
        parent_rows = parents.numpy()
        moved = (parent_rows != np.arange(len(parent_rows))).nonzero()[0]
        if not len(moved):
            return partial(self._set_rows, parents, lengths)
        sources, stop = parent_rows[moved], int(lengths.numpy()[moved].max())
        self._ensure_rows(max(len(parent_rows), self._num_rows))
        copies = self._prepare_moves(moved, sources, self._prefix_groups.shared_length(moved, sources), stop)

        def commit() -> None:
            copies.run()
            self._written.clear(self._all_blocks(), moved, np.full_like(moved, stop))
            self.copied_slots += copies.num_slots
            self._set_rows(parents, lengths)

        return commit

    def _grown_length(self, old: int, slots: int) -> int:
        """The number of slots of a block that must have at least `slots`."""
        if not old:  # no spare slots: the activations of a prefill need memory that a decode step does not
            return slots
        grown, expected = slots + max(slots // 8, _MIN_GROWTH), self._expected_length
        if expected is None or slots > expected:
            return grown
        return expected if expected <= slots + _LAST_GROWTH else min(grown, expected)


# Capacities for compiled steps are multiples of this, so that one compiled step serves many lengths.
_CAPACITY_STEP = 256

Blocks = dict[int, Tensor]  # by layer [R, H, S, D]


def round_up_rows(rows: int) -> int:
    """The next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def round_up_capacity(capacity: int) -> int:
    """The next multiple of 256 slots."""
    return -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP


class StaticStore(DenseStore):
    """Keys and values [rows, H, capacity, D] per layer, allocated at the first write.

    Position `p` of a row is its slot `p`. A forward sees the slots up to its longest row, as in the dense
    cache. A compiled step writes to the blocks in place (`layer_views`), so its shapes depend only on their
    size. With a `compile_config` the capacity is rounded up to a multiple of 256. `rows` fixes the number
    of rows; without it blocks double when rows run out, the only time their address changes. Commits move
    rows in place.
    """

    capacity: int = 0
    grows = False  # everything is allocated at the start

    def __init__(
        self, capacity: int, rows: int | None = None, compile_config: CompileConfig | None = None
    ) -> None:
        if capacity < 1:
            raise InputError("capacity", "must be >= 1", capacity)
        if rows is not None and rows < 1:
            raise InputError("rows", "must be >= 1 or None", rows)
        super().__init__()
        self._settings = capacity, rows, compile_config
        self.capacity = capacity if compile_config is None else round_up_capacity(capacity)
        self.compile_config = compile_config
        self._max_rows = rows
        self._layer_views: dict[int, tuple[Blocks, Blocks]] = {}

    def visible_slots(self, layer: int, span: KVSpan) -> VisibleSlots | None:  # noqa: ARG002 - layers are alike
        """None while the span fits; all slots where only padding exceeds the capacity."""
        if span.read_length <= self.capacity:
            return None
        return VisibleSlots(torch.from_numpy(span.on_host(self._num_rows)[1]), self.capacity)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        if span.read_length <= self.capacity:
            return super().update(layer, key, value, span)
        if isinstance(span.start, int):
            raise self._capacity_error(span.read_length)
        # Rows start at different slots: what exceeds the capacity is padding, and is not written.
        rows, starts = (torch.from_numpy(column) for column in span.on_host(self._num_rows))
        slots = starts[:, None] + torch.arange(span.width)
        index, step = (slots < self.capacity).nonzero(as_tuple=True)
        pair = self._layer_blocks(layer, key, value, self.capacity)
        self._mark_written(span)
        visible = []
        for block, new in zip(pair, (key, value), strict=True):
            device = block.device
            target_rows, target_slots = rows[index].to(device), slots[index, step].to(device)
            block[target_rows, :, target_slots] = new[index.to(device), :, step.to(device)]
            visible.append(block[rows.to(device)])
        return visible[0], visible[1]

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        super().to(device)
        self._layer_views = {}

    def count_slots(self, workload: Workload) -> int | None:
        """The slots of the blocks, allocated at once."""
        return self.block_slots(workload.num_fed)

    def block_slots(self, rows: int) -> int:
        """The number of slots of a block for so many rows."""
        return self._block_rows(rows) * self.capacity

    def layer_views(self, rows: int) -> tuple[Blocks, Blocks] | None:
        """Views of the first `rows` rows of every layer's keys and values, to read and write in place.

        Grows the blocks if needed. Rows behind the last one are unused, so a step for a rounded number of
        rows may write there. None before the first write.
        """
        if not self._keys:
            return None
        self._ensure_rows(rows)
        # A step writes one slot of each row, and anywhere in the rows behind the last.
        self._written.mark(np.arange(self._num_rows), self._lengths.numpy() + 1)
        self._written.mark(np.arange(self._num_rows, rows), self.capacity)
        views = self._layer_views.get(rows)
        if views is None:
            keys, values = (
                {layer: blocks[layer][:rows] for layer in sorted(blocks)}
                for blocks in (self._keys, self._values)
            )
            views = self._layer_views[rows] = keys, values
        return views

    def reserve(self, layer: int, like: Tensor) -> None:
        """Allocate the blocks of a layer before its first write, in the heads and dtype of [0, H, 0, D]."""
        self._ensure_capacity(layer, (like, like), 0, 0)

    def clear_blocks(self) -> None:
        """Fill all blocks with zeros."""
        for block in self._all_blocks():
            block.zero_()

    # -------------------------------------------------------------------- blocks
    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block padded to the capacity."""
        if block.shape[2] > self.capacity:
            raise self._capacity_error(block.shape[2])
        return self._padded(block, len(block))

    def _ensure_capacity(
        self, layer: int, like: Sequence[Tensor], slots: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        old = self._keys.get(layer), self._values.get(layer)
        pair = super()._ensure_capacity(layer, like, slots, rows)
        if pair[0] is not old[0] or pair[1] is not old[1]:
            self._layer_views = {}
        return pair

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        if slots > self.capacity:
            raise self._capacity_error(slots)
        if block is None:
            block = like[:0, :, :0]
        elif len(block) >= rows:
            return block
        return self._padded(block, rows)

    def _padded(self, block: Tensor, rows: int) -> Tensor:
        """A block of full size with the content of another, zero elsewhere."""
        num_rows = self._block_rows(rows)
        shape = (num_rows, block.shape[1], self.capacity, block.shape[3])
        # Compiled steps are specialised on inference tensors, so the caller's inference mode must not matter.
        with torch.inference_mode(False):
            try:
                padded = torch.zeros(shape, dtype=block.dtype, device=block.device)
            except (RuntimeError, MemoryError) as error:
                size = prod(shape) * block.element_size()
                raise NotEnoughMemory(
                    f"the static cache of {num_rows} rows of {self.capacity} positions needs blocks of "
                    f"{format_bytes(size)}, which {block.device} cannot allocate: lower `max_cache_len` or "
                    "`batch_size`",
                    size,
                ) from error
        padded[: len(block), :, : block.shape[2]] = block
        return padded

    def _block_rows(self, rows: int) -> int:
        return round_up_rows(max(rows, self._max_rows or 1))

    # -------------------------------------------------------------------- limits
    def _check_room(self, rows: int, lengths: Tensor) -> None:
        if largest(lengths) > self.capacity:
            raise self._capacity_error(largest(lengths))
        if self._max_rows is not None and rows > self._max_rows:
            raise InputError("rows", f"must be >= the {rows} rows in use", self._max_rows)

    def _capacity_error(self, positions: int) -> InputError:
        return InputError("capacity", f"must be >= the {positions} positions of a row", self.capacity)


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
        self.offload_device = torch.device(device)  # on which all blocks are stored
        self._prefetched_layer: _PrefetchedLayer | None = None
        self._offload_span: tuple[KVSpan, KVSpan] | None = None  # the last span, as given and offloaded
        self._streams: dict[torch.device, Any] = {}
        self._compute_devices: dict[int, torch.device] = {}  # by layer

    @property
    def nbytes(self) -> int:
        """The memory of all blocks and of the prefetched layer in bytes."""
        return super().nbytes + self.prefetched_bytes

    @property
    def prefetched_bytes(self) -> int:
        """The memory of the prefetched layer on the compute device in bytes."""
        layer = self._prefetched_layer
        return 0 if layer is None else layer.keys.nbytes + layer.values.nbytes

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D] on the keys' device."""
        device = key.device
        if device == self.offload_device:
            return super().update(layer, key, value, span)
        self._compute_devices[layer] = device
        offloaded = key.to(self.offload_device), value.to(self.offload_device)
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
        if isinstance(span.start, int):
            for block, new in ((fetched.keys, key), (fetched.values, value)):
                block[: len(new), :, span.start : span.start + span.width] = new
        else:
            rows, slots = torch.arange(len(key), device=device), self._write_index(span, device)[1]
            write_slots((fetched.keys, fetched.values), (key, value), rows, slots)
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
        self.offload_device, self._prefetched_layer, self._offload_span = torch.device(device), None, None
        super().to(device)

    def _has_capacity(self, span: KVSpan) -> bool:  # noqa: ARG002 - for subclasses
        """Whether blocks can hold all slots of the span."""
        return True

    # -------------------------------------------------------------------- transfers
    def _to_offload_span(self, span: KVSpan) -> KVSpan:
        """The span on the offload device; one object for all layers."""
        if self._offload_span is None or self._offload_span[0] is not span:
            host_rows, starts = (torch.from_numpy(column) for column in span.on_host(self._num_rows))
            rows = None if span.rows is None else host_rows.to(self.offload_device)
            start = span.start if isinstance(span.start, int) else starts.to(self.offload_device)
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
        other.offload_device = self.offload_device
        return other

    def _prepare_block(self, block: Tensor) -> Tensor:
        return super()._prepare_block(block.to(self.offload_device))

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        if like.device != self.offload_device:
            like = like[:0, :, :0].to(self.offload_device)
        return super()._grow_block(block, like, slots, rows)


class OffloadedStaticStore(OffloadedStore, StaticStore):
    """A static cache stored on `device`."""

    def __init__(self, capacity: int, rows: int | None = None, device: Device = "cpu") -> None:
        StaticStore.__init__(self, capacity, rows)
        self._settings = capacity, rows, device
        self._init_offload(device)

    def _has_capacity(self, span: KVSpan) -> bool:
        return span.read_length <= self.capacity
