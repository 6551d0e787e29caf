"""The dense cache: one contiguous block of slots per row, grown as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.prefix_groups import PrefixGroups

__all__ = ["DenseStore"]

# Blocks grow by at least this many slots, so that long texts rarely reallocate.
_GROWTH_STEP = 64


class DenseStore:
    """Keys and values [R, H, S, D] per layer; position `p` of a row is its slot `p`.

    Cutting a row only changes its length: stale slots are masked until they are written again. Moving a
    row copies it. Rows with a common ancestor already hold the same prefix, so only the slots after it are
    copied: beam search never copies the prompt.
    """

    max_rewind: int | None = None
    lossless = True

    @property
    def capacity(self) -> int | None:
        """No limit."""
        return None

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._num_rows = 0
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._prefix_groups = PrefixGroups()
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
        self._num_rows += rows
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._prefix_groups.extend(rows)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; returns the slots of its rows [N, H, S, D], stale ones included."""
        keys = self._keys.get(layer)
        if keys is None or keys.shape[2] < span.read_length or keys.shape[0] < self._num_rows:
            keys = self._ensure_capacity(self._keys, layer, key, span.read_length)
            self._ensure_capacity(self._values, layer, value, span.read_length)
        values = self._values[layer]
        if span.rows is None and isinstance(span.start, int):
            stop = span.start + span.width
            keys[: self._num_rows, :, span.start : stop] = key
            values[: self._num_rows, :, span.start : stop] = value
            return self._first_slots(layer, span.read_length)
        rows, at = self._write_index(span, key.device)
        keys[rows[:, None], :, at] = key.transpose(1, 2)
        values[rows[:, None], :, at] = value.transpose(1, 2)
        if span.is_first_write:
            return key, value
        if span.rows is None:
            return self._first_slots(layer, span.read_length)
        return keys[rows, :, : span.read_length], values[rows, :, : span.read_length]

    def _first_slots(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots of all rows [R, H, S, D]."""
        keys, values = self._keys[layer], self._values[layer]
        return keys[: self._num_rows, :, :stop], values[: self._num_rows, :, :stop]

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
        if parents is not None:
            moves = (parents != torch.arange(len(parents))).nonzero().squeeze(1)
            if len(moves):
                self._move_rows(parents, moves, lengths)
            self._num_rows = len(parents)
        self._prefix_groups.commit(None if parents is None else parents.numpy(), lengths.numpy())
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
        for source, target in ((self._keys, other._keys), (self._values, other._values)):
            for layer, block in source.items():
                # The block may not have grown to rows that were never written.
                block = _grow_rows(block, self._num_rows)
                target[layer] = self._prepare_block(block[rows.to(block.device), :, :stop])
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store."""
        first, slots = self._num_rows, int(other._lengths.max()) if len(other) else 0
        self._num_rows += len(other)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._prefix_groups.join(other._prefix_groups)
        for target, source in ((self._keys, other._keys), (self._values, other._values)):
            for layer, block in source.items():
                grown, count = self._ensure_capacity(target, layer, block, slots), min(len(block), len(other))
                grown[first : first + count, :, :slots] = block[:count, :, :slots]

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

    def _make_empty(self) -> Self:
        """An empty store with the same settings."""
        return type(self)()

    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block in the layout and on the device of this store."""
        return block.contiguous()

    def _move_rows(self, parents: Tensor, moves: Tensor, lengths: Tensor) -> None:
        """Copy the rows whose index changes."""
        source = parents[moves]
        stop = int(lengths[moves].max())
        starts = torch.from_numpy(self._prefix_groups.shared_length(moves.numpy(), source.numpy()))
        related = starts > 0
        copies = []
        for group in (related, ~related):  # at most two copies, each of one slice of slots
            start = int(starts[group].min()) if bool(group.any()) else stop
            if start < stop:
                copies.append((moves[group], source[group], slice(start, stop)))
                self.copied_slots += int(group.sum()) * (stop - start)
        for blocks in (self._keys, self._values):
            for layer, block in blocks.items():
                block = _grow_rows(block, max(len(parents), self._num_rows))
                # Read everything before writing: the source of one copy may be the target of another.
                contents = [block[rows.to(block.device), :, slots] for _, rows, slots in copies]
                for (targets, _, slots), content in zip(copies, contents, strict=True):
                    block[targets.to(block.device), :, slots] = content
                blocks[layer] = block

    def _ensure_capacity(self, blocks: dict[int, Tensor], layer: int, like: Tensor, slots: int) -> Tensor:
        """The layer's block, grown to all rows and at least so many slots."""
        block = blocks.get(layer)
        if block is None:
            block = like.new_zeros(self._num_rows, like.shape[1], slots + _GROWTH_STEP, like.shape[3])
        elif block.shape[2] < slots:
            # By an eighth: attention reads the whole block every step, so an occasional copy is cheap.
            wider = max(slots + _GROWTH_STEP, block.shape[2] + block.shape[2] // 8)
            rows = max(self._num_rows, block.shape[0])
            grown = block.new_zeros(rows, block.shape[1], wider, block.shape[3])
            grown[: block.shape[0], :, : block.shape[2]] = block
            block = grown
        block = _grow_rows(block, self._num_rows)
        blocks[layer] = block
        return block


def _grow_rows(block: Tensor, rows: int) -> Tensor:
    """A block with at least so many rows, doubled where it grows."""
    if block.shape[0] >= rows:
        return block
    grown = block.new_zeros(max(rows, 2 * block.shape[0]), *block.shape[1:])
    grown[: block.shape[0]] = block
    return grown
