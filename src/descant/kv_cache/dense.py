"""The dense cache: one contiguous block of slots per row, grown as needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.packed_span import PackedGroup, PackedSpan
from descant.kv_cache.prefix_groups import PrefixGroups
from descant.kv_cache.row_copies import RowCopies, RowCopy
from descant.kv_cache.written_slots import WrittenSlots

__all__ = ["DenseStore"]

# Blocks grow by an eighth, and at least by so many slots: attention reads the whole block in every step, so
# an occasional copy is cheap.
_MIN_GROWTH = 16
# Where so few slots are missing to the expected length, blocks grow to it at once.
_LAST_GROWTH = 64


class DenseStore:
    """Keys and values [R, H, S, D] per layer; position `p` of a row is its slot `p`.

    Cutting a row only changes its length: stale slots are masked until they are written again. Moving a
    row copies it. Rows with a common ancestor already hold the same prefix, so only the slots after it are
    copied: beam search never copies the prompt. Every operation allocates before it writes, so that one that
    runs out of memory changes nothing. Blocks do not grow beyond `expected_length` slots unless a row does.
    """

    max_rewind: int | None = None
    lossless = True

    @property
    def capacity(self) -> int | None:
        """No limit."""
        return None

    def __init__(self, expected_length: int | None = None) -> None:
        self._expected_length = expected_length
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._num_rows = 0
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._prefix_groups = PrefixGroups()
        self._written = WrittenSlots()
        self._marked_span: KVSpan | None = None  # the last span that was marked as written
        self._index_by_device: dict[torch.device, tuple[KVSpan, Tensor, Tensor]] = {}
        self.copied_slots = 0  # slots copied between rows; part of what bench/beams.py measures

    def __len__(self) -> int:
        return self._num_rows

    @property
    def lengths(self) -> Tensor:
        """The number of positions of each row [R] (host)."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """The memory of all blocks in bytes."""
        return sum(block.nbytes for blocks in (self._keys, self._values) for block in blocks.values())

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        """None: slot `p` is position `p`."""

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._clear_rows(np.arange(self._num_rows, self._num_rows + rows))
        self._prefix_groups.extend(rows)
        self._num_rows, self._lengths = len(lengths), lengths

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        if span is not self._marked_span:
            self._mark_written(span)
        keys, values = self._layer_blocks(layer, key, value, span.read_length)
        if span.rows is None and isinstance(span.start, int):
            # `narrow` takes half the time of a subscript.
            self._used_rows(keys).narrow(2, span.start, span.width).copy_(key)
            self._used_rows(values).narrow(2, span.start, span.width).copy_(value)
            return self._first_slots(layer, span.read_length)
        rows, at = self._write_index(span, key.device)
        keys[rows[:, None], :, at] = key.transpose(1, 2)
        values[rows[:, None], :, at] = value.transpose(1, 2)
        if span.is_first_write:
            return key, value
        if span.rows is None:
            return self._first_slots(layer, span.read_length)
        return keys[rows, :, : span.read_length], values[rows, :, : span.read_length]

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

    def _clear_rows(self, rows: Array) -> None:
        """Zero all that earlier rows have left in the place of these rows [N]."""
        self._written.clear(self._all_blocks(), rows, np.zeros_like(rows))

    def _all_blocks(self) -> list[Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def _first_slots(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots of all rows [R, H, S, D]."""
        keys, values = self._used_rows(self._keys[layer]), self._used_rows(self._values[layer])
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def _used_rows(self, block: Tensor) -> Tensor:
        """The rows of a block that are in use; it may have grown to more."""
        return block if block.shape[0] == self._num_rows else block.narrow(0, 0, self._num_rows)

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

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`."""
        self.prepare_commit(parents, lengths)()

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit for which all memory is allocated; nothing changes until it is called."""
        if parents is None:
            return partial(self._cut_rows, lengths)
        move = self._prepare_moves(parents, lengths)

        def commit() -> None:
            if move is not None:
                move()
            self._num_rows = len(parents)
            self._prefix_groups.commit(parents.numpy(), lengths.numpy())
            self._lengths = lengths

        return commit

    def _cut_rows(self, lengths: Tensor) -> None:
        """Cut every row to its length."""
        self._prefix_groups.commit(None, lengths.numpy())
        self._lengths = lengths

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted(self._keys)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed keys and values [N, H, S, D] of rows [N] (host); stale behind a row's length."""
        stop = int(self._lengths[rows].max()) if len(rows) else 0
        keys, values = (_grow_rows(blocks[layer], self._num_rows) for blocks in (self._keys, self._values))
        return keys[rows.to(keys.device), :, :stop], values[rows.to(values.device), :, :stop]

    def select(self, rows: Tensor) -> Self:
        """A copy of the committed content of these rows [N] (host)."""
        other = self._make_empty()
        other.extend(len(rows))
        other._lengths = self._lengths[rows].clone()
        other._prefix_groups = self._prefix_groups.select(rows.numpy(), other._lengths.numpy())
        stop = int(other._lengths.max()) if len(rows) else 0
        other._written.mark(np.arange(len(rows)), stop)
        for source, target in ((self._keys, other._keys), (self._values, other._values)):
            for layer, block in source.items():
                # The block may not have grown to rows that were never written.
                block = _grow_rows(block, self._num_rows)
                target[layer] = self._prepare_block(block[rows.to(block.device), :, :stop])
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        first, count = self._num_rows, len(other)
        slots = int(other._lengths.max()) if count else 0
        lengths = torch.cat((self._lengths, other._lengths))
        pairs = {layer: (keys, other._values[layer]) for layer, keys in other._keys.items()}
        grown = {
            layer: self._ensure_capacity(layer, pair, slots, len(lengths)) for layer, pair in pairs.items()
        }
        added = np.arange(first, len(lengths))
        self._clear_rows(added)
        self._written.mark(added, slots)
        for layer, pair in pairs.items():
            for block, source in zip(grown[layer], pair, strict=True):
                present = min(len(source), count)
                block[first : first + present, :, :slots] = source[:present, :, :slots]
        self._prefix_groups.join(other._prefix_groups)
        self._num_rows, self._lengths = len(lengths), lengths

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for blocks in (self._keys, self._values):
            for layer, block in blocks.items():
                blocks[layer] = block.to(device)
        self._index_by_device = {}

    def state(self) -> dict[str, Tensor]:
        """All committed rows: lengths, and by layer a block of keys and one of values."""
        stop = int(self._lengths.max()) if self._num_rows else 0
        state = {"lengths": self._lengths.clone()}
        for name, blocks in (("keys", self._keys), ("values", self._values)):
            for layer, block in blocks.items():
                committed = _grow_rows(block, self._num_rows)[: self._num_rows, :, :stop]
                state[f"{name}.{layer}"] = committed.contiguous().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store."""
        self.extend(len(state["lengths"]))
        self._lengths = state["lengths"].long().cpu()
        for name, blocks in (("keys", self._keys), ("values", self._values)):
            for key, block in state.items():
                kind, _, layer = key.partition(".")
                if kind == name:
                    blocks[int(layer)] = self._prepare_block(block)
                    self._written.mark(np.arange(self._num_rows), block.shape[2])

    def _make_empty(self) -> Self:
        """An empty store with the same settings."""
        return type(self)(self._expected_length)

    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block in the layout and on the device of this store."""
        return block.contiguous()

    def _prepare_moves(self, parents: Tensor, lengths: Tensor) -> Callable[[], None] | None:
        """The copies of the rows whose index changes; None: there are none."""
        given = parents.numpy()
        moves = (given != np.arange(len(given))).nonzero()[0]
        if not len(moves):
            return None
        source = given[moves]
        stop = int(lengths.numpy()[moves].max())
        starts = self._prefix_groups.shared_length(moves, source)
        related = starts > 0
        # At most two copies, each of one slice of slots.
        groups = (slice(None),) if related.all() else (related, ~related)
        copies = []
        for group in groups:
            start = int(starts[group].min(initial=stop))
            if start < stop:
                targets, sources = torch.from_numpy(moves[group]), torch.from_numpy(source[group])
                copies.append(RowCopy(targets, sources, slice(start, stop)))
        rows = max(len(parents), self._num_rows)
        for layer, keys in list(self._keys.items()):
            if min(keys.shape[0], self._values[layer].shape[0]) < rows:
                self._ensure_capacity(layer, (keys, self._values[layer]), 0, rows)
        blocks = self._all_blocks()
        row_copies = RowCopies(blocks, copies)

        def move() -> None:
            row_copies.run()
            self._written.clear(blocks, moves, np.full_like(moves, stop))
            self.copied_slots += row_copies.num_slots

        return move

    def _ensure_capacity(
        self, layer: int, like: tuple[Tensor, Tensor], slots: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        """The layer's blocks, grown to at least so many rows and slots, both or none."""
        keys = self._grow_block(self._keys.get(layer), like[0], slots, rows)
        values = self._grow_block(self._values.get(layer), like[1], slots, rows)
        self._values[layer], self._keys[layer] = values, keys  # a layer with keys always has values
        return keys, values

    def _grow_block(self, block: Tensor | None, like: Tensor, slots: int, rows: int) -> Tensor:
        """A block of at least so many rows and slots, with the content of the old one."""
        if block is None:
            # Without spare slots: the activations of a prefill need memory that a decode step does not.
            return like.new_zeros(rows, like.shape[1], slots, like.shape[3])
        if block.shape[2] < slots:
            wider, rows = self._grown_length(slots), max(rows, block.shape[0])
            grown = block.new_zeros(rows, block.shape[1], wider, block.shape[3])
            grown[: block.shape[0], :, : block.shape[2]] = block
            block = grown
        return _grow_rows(block, rows)

    def _grown_length(self, slots: int) -> int:
        """How many slots a block gets that must have at least `slots`."""
        grown, expected = slots + max(slots // 8, _MIN_GROWTH), self._expected_length
        if expected is None or slots > expected:
            return grown
        return expected if expected <= slots + _LAST_GROWTH else min(grown, expected)


def _grow_rows(block: Tensor, rows: int) -> Tensor:
    """A block with at least so many rows, doubled where it grows."""
    if block.shape[0] >= rows:
        return block
    grown = block.new_zeros(max(rows, 2 * block.shape[0]), *block.shape[1:])
    grown[: block.shape[0]] = block
    return grown
