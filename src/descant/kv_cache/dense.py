"""The dense cache: a block of slots for every row, grown as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.prefix_groups import PrefixGroups

__all__ = ["DenseStore"]

# Room is added in steps of at least this many slots, so that a long text reallocates seldom.
_GROWTH_STEP = 64


class DenseStore:
    """Keys and values as [rows, heads, slots, dim] a layer; position `p` of a row is its slot `p`.

    Cutting a row changes its length and nothing else: stale slots are masked until written again.
    Moving a row copies it, but rows that descend from one ancestor already share what it had written
    before they parted, so among them only the slots after that are copied: a beam search never
    moves its prompt.
    """

    max_rewind: int | None = None

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._num_rows = 0
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._prefix_groups = PrefixGroups()
        self._index_by_device: dict[torch.device, tuple[KVSpan, Tensor, Tensor]] = {}
        self.copied_slots = 0  # slots of keys and values copied between rows, for reports and tests

    def __len__(self) -> int:
        return self._num_rows

    @property
    def lengths(self) -> Tensor:
        """How many positions each row holds [R] (host)."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What the blocks take in memory."""
        return sum(block.nbytes for store in (self._keys, self._values) for block in store.values())

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        """Slot `p` is position `p`."""

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._num_rows += rows
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._prefix_groups.extend(rows)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], stale slots included."""
        keys = self._keys.get(layer)
        if keys is None or keys.shape[2] < span.read_length or keys.shape[0] < self._num_rows:
            keys = self._ensure_capacity(self._keys, layer, key, span.read_length)
            self._ensure_capacity(self._values, layer, value, span.read_length)
        values = self._values[layer]
        if span.rows is None and isinstance(span.start, int):
            stop = span.start + span.width
            keys[: self._num_rows, :, span.start : stop] = key
            values[: self._num_rows, :, span.start : stop] = value
            return keys[: self._num_rows, :, : span.read_length], values[
                : self._num_rows, :, : span.read_length
            ]
        rows, at = self._write_index(span, key.device)
        keys[rows[:, None], :, at] = key.transpose(1, 2)
        values[rows[:, None], :, at] = value.transpose(1, 2)
        if span.is_first_write:
            return key, value
        if span.rows is None:
            return keys[: self._num_rows, :, : span.read_length], values[
                : self._num_rows, :, : span.read_length
            ]
        return keys[rows, :, : span.read_length], values[rows, :, : span.read_length]

    def _write_index(self, span: KVSpan, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows [N] and slots [N, T] of a span on a layer's device, found once a device and forward."""
        known = self._index_by_device.get(device)
        if known is None or known[0] is not span:
            rows = (
                torch.arange(self._num_rows, device=device)
                if span.rows is None
                else span.rows.to(device, non_blocking=True)
            )
            slots = torch.arange(span.width, device=device)
            start = span.start
            if isinstance(start, Tensor):
                start = start.to(device, non_blocking=True)[:, None]
            known = self._index_by_device[device] = (span, rows, slots + start)
        return known[1:]

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
        """What these rows [N] (host) hold of a layer as last committed [N, H, S, D], stale behind its end."""
        stop = int(self._lengths[rows].max()) if len(rows) else 0
        keys, values = (_grow_rows(store[layer], self._num_rows) for store in (self._keys, self._values))
        return keys[rows.to(keys.device), :, :stop], values[rows.to(values.device), :, :stop]

    def select(self, rows: Tensor) -> Self:
        """A copy of these rows [N] (host), as last committed."""
        other = self._make_empty()
        other.extend(len(rows))
        other._lengths = self._lengths[rows].clone()
        other._prefix_groups = self._prefix_groups.select(rows.numpy(), other._lengths.numpy())
        stop = int(other._lengths.max()) if len(rows) else 0
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for layer, block in mine.items():
                # Rows that were never fed may not have a place yet.
                block = _grow_rows(block, self._num_rows)
                theirs[layer] = self._prepare_block(block[rows.to(block.device), :, :stop])
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own."""
        first, slots = self._num_rows, int(other._lengths.max()) if len(other) else 0
        self._num_rows += len(other)
        self._lengths = torch.cat((self._lengths, other._lengths))
        self._prefix_groups.join(other._prefix_groups)
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for layer, block in theirs.items():
                room, fed = self._ensure_capacity(mine, layer, block, slots), min(len(block), len(other))
                room[first : first + fed, :, :slots] = block[:fed, :, :slots]

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for store in (self._keys, self._values):
            for layer, block in store.items():
                store[layer] = block.to(device)
        self._index_by_device = {}

    def state(self) -> dict[str, Tensor]:
        """All rows as last committed: their lengths, and a block of keys and one of values a layer."""
        stop = int(self._lengths.max()) if self._num_rows else 0
        state = {"lengths": self._lengths.clone()}
        for name, store in (("keys", self._keys), ("values", self._values)):
            for layer, block in store.items():
                whole = _grow_rows(block, self._num_rows)[: self._num_rows, :, :stop]
                state[f"{name}.{layer}"] = whole.contiguous().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into an empty cache."""
        self.extend(len(state["lengths"]))
        self._lengths = state["lengths"].long().cpu()
        for name, store in (("keys", self._keys), ("values", self._values)):
            for part, block in state.items():
                kind, _, layer = part.partition(".")
                if kind == name:
                    store[int(layer)] = self._prepare_block(block)

    def _make_empty(self) -> Self:
        """Another one like it that holds nothing."""
        return type(self)()

    def _prepare_block(self, block: Tensor) -> Tensor:
        """A block as this cache holds it."""
        return block.contiguous()

    def _move_rows(self, parents: Tensor, moves: Tensor, lengths: Tensor) -> None:
        """Copy the rows that change place."""
        source = parents[moves]
        stop = int(lengths[moves].max())
        starts = torch.from_numpy(self._prefix_groups.shared_length(moves.numpy(), source.numpy()))
        kin = starts > 0
        parts = []
        for which in (kin, ~kin):  # two copies at the most, each of one slice of slots
            start = int(starts[which].min()) if bool(which.any()) else stop
            if start < stop:
                parts.append((moves[which], source[which], slice(start, stop)))
                self.copied_slots += int(which.sum()) * (stop - start)
        for store in (self._keys, self._values):
            for layer, block in store.items():
                block = _grow_rows(block, max(len(parents), self._num_rows))
                # All is read before anything is written: a source may be another move's target.
                read = [block[out_of.to(block.device), :, slots] for _, out_of, slots in parts]
                for (into, _, slots), content in zip(parts, read, strict=True):
                    block[into.to(block.device), :, slots] = content
                store[layer] = block

    def _ensure_capacity(self, store: dict[int, Tensor], layer: int, like: Tensor, slots: int) -> Tensor:
        """The layer's block with room for all rows and so many slots."""
        block = store.get(layer)
        if block is None:
            block = like.new_zeros(self._num_rows, like.shape[1], slots + _GROWTH_STEP, like.shape[3])
        elif block.shape[2] < slots:
            # An eighth: all of it is read at every step anyway, so that a copy now and then is cheap.
            wide = max(slots + _GROWTH_STEP, block.shape[2] + block.shape[2] // 8)
            grown = block.new_zeros(max(self._num_rows, block.shape[0]), block.shape[1], wide, block.shape[3])
            grown[: block.shape[0], :, : block.shape[2]] = block
            block = grown
        block = _grow_rows(block, self._num_rows)
        store[layer] = block
        return block


def _grow_rows(block: Tensor, rows: int) -> Tensor:
    """A block with room for so many rows, doubled where it had not."""
    if block.shape[0] >= rows:
        return block
    grown = block.new_zeros(max(rows, 2 * block.shape[0]), *block.shape[1:])
    grown[: block.shape[0]] = block
    return grown
