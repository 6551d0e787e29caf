"""The paged cache: rows are lists of blocks, and rows that descend from one share what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.shared_prefix_attention import PagedReadPlan, SharedPrefixKV

__all__ = ["PagedStore"]

# What is written at once from so many slots on lies together, in an arena of its own.
_MIN_SLAB_SLOTS = 64


class PagedStore:
    """Keys and values in blocks that are counted and shared (Kwon et al. 2023, PagedAttention).

    To fork or reorder rows moves numbers of blocks, never keys or values; a row that writes into a block
    which others hold too gets a copy of that block alone. Attention reads what rows share once for all of
    them. Slot `p` of a row is its position `p`.
    """

    max_rewind: int | None = None

    def __init__(self, block: int = 16, pool: BlockPool | None = None) -> None:
        self.pool = BlockPool(block) if pool is None else pool
        self.pool.block_tables.add(self)
        self._block_table: Array = np.full((0, 8), -1, dtype=np.int64)  # [R, M] numbers of blocks, -1: none
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._plan: PagedReadPlan | None = None

    def __len__(self) -> int:
        return len(self._block_table)

    def __del__(self) -> None:
        if hasattr(self, "_block_table"):
            self.pool.decref(self.referenced_blocks())

    @property
    def lengths(self) -> Tensor:
        """How many positions each row holds [R] (host)."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """What its blocks take in memory, together with those of the tables that share them."""
        return self.pool.nbytes

    @property
    def copied_slots(self) -> int:
        """How many slots were copied to part rows."""
        return self.pool.copied_slots

    @property
    def num_used_blocks(self) -> int:
        """How many blocks are held by anybody."""
        return self.pool.num_used_blocks

    def referenced_blocks(self) -> Array:
        """The blocks that rows hold, as often as they hold them."""
        return self._block_table[self._block_table >= 0]

    def check_ref_counts(self) -> None:
        """Raise if any block is leaked or free while it is held."""
        self.pool.check_ref_counts()

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        """Slot `p` is position `p`."""

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        empty = np.full((rows, self._block_table.shape[1]), -1, dtype=np.int64)
        self._block_table = np.concatenate((self._block_table, empty))
        self._lengths = torch.cat((self._lengths, torch.zeros(rows, dtype=torch.long)))
        self._plan = None

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` cut to `lengths[i]`: numbers of blocks, nothing else."""
        old = self._block_table
        new = old if parents is None else old[parents.numpy()]
        count = -(-lengths.numpy() // self.pool.block_size)
        beyond = (np.arange(new.shape[1]) >= count[:, None]) & (new >= 0)
        if parents is not None or beyond.any():
            new = np.where(beyond, -1, new)
            # What goes on is named anew before the old is dropped, so that nothing is free in between.
            self.pool.incref(new[new >= 0])
            self.pool.decref(old[old >= 0])
            self._block_table = new
        self._lengths, self._plan = lengths, None

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Any, Any]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], not laid out."""
        plan = self._plan
        if plan is None or plan.span is not span:
            plan = self._plan = self._plan_write(span)
        for name, fresh in (("keys", key), ("values", value)):
            for number, lines, slots in plan.writes_by_slab(key.device):
                arena = self.pool.slabs[number]
                room = arena.ensure_capacity(getattr(arena, name), layer, fresh, self.pool.block_size)
                flat = fresh.transpose(0, 1).flatten(1, 2)  # [H, N * T, D]
                room[:, slots] = flat if lines is None else flat[:, lines]
        if span.is_first_write:
            return key, value
        shape = (*key.shape[:2], span.read_length, key.shape[3])
        keys = SharedPrefixKV(shape, key, plan, layer, "keys")
        return keys, SharedPrefixKV((*shape[:3], value.shape[3]), value, plan, layer, "values")

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted({layer for arena in self.pool.slabs.values() for layer in arena.keys})

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What these rows [N] (host) hold of a layer as last committed [N, H, S, D], stale behind its end."""
        stop = int(self._lengths[rows].max()) if len(rows) else 0
        plan = PagedReadPlan(self.pool, self._block_table[rows.numpy()], stop)
        return plan.gather("keys", layer), plan.gather("values", layer)

    def select(self, rows: Tensor) -> Self:
        """A table of its own with these rows [N] (host), which shares all their blocks."""
        other = type(self)(pool=self.pool)
        # What a forward wrote and nobody committed is left behind.
        count = -(-self._lengths[rows].numpy() // self.pool.block_size)
        table = self._block_table[rows.numpy()]
        other._block_table = np.where(np.arange(table.shape[1]) < count[:, None], table, -1)
        other._lengths = self._lengths[rows].clone()
        self.pool.incref(other.referenced_blocks())
        return other

    def join(self, other: Self) -> None:
        """Take the rows of another one below its own: their blocks, or copies where the pool is another."""
        if other.pool is not self.pool:
            other = self._copy_to_pool(other)
        mine = _grow_table(self._block_table, other._block_table.shape[1])
        theirs = np.full((len(other), mine.shape[1]), -1, dtype=np.int64)
        theirs[:, : other._block_table.shape[1]] = other._block_table
        self._block_table = np.concatenate((mine, theirs))
        self._lengths = torch.cat((self._lengths, other._lengths))
        other._block_table, other._lengths = other._block_table[:0], other._lengths[:0]
        self._plan = None

    def _copy_to_pool(self, other: Self) -> Self:
        """The rows of another pool in this one, shared as they were."""
        mine = type(self)(pool=self.pool)
        mine.load(other.state())
        return mine

    def to(self, device: torch.device | str) -> None:
        """Move all blocks, those of tables that share them included."""
        self.pool.to(device)
        self._plan = None

    def state(self) -> dict[str, Tensor]:
        """The rows' tables and lengths, and once every block that they hold [H, slots, D] a layer."""
        count = -(-self._lengths.numpy() // self.pool.block_size)
        table = np.where(np.arange(self._block_table.shape[1]) < count[:, None], self._block_table, -1)
        held, place = np.unique(table[table >= 0], return_inverse=True)
        numbered = np.full(table.shape, -1, dtype=np.int64)
        numbered[table >= 0] = place
        wide = int(count.max()) if len(count) else 0
        state = {
            "lengths": self._lengths.clone(),
            "table": torch.from_numpy(numbered[:, :wide].copy()),
        }
        plan = PagedReadPlan(self.pool, held[None, :], len(held) * self.pool.block_size)
        for name in ("keys", "values"):
            layers = {layer for arena in self.pool.slabs.values() for layer in getattr(arena, name)}
            for layer in sorted(layers) if len(held) else ():
                state[f"{name}.{layer}"] = plan.gather(name, layer)[0].contiguous().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave, into a table that holds nothing."""
        table = state["table"].cpu().numpy()
        count = int(table.max()) + 1 if table.size else 0
        if count:
            blocks = np.asarray(self.pool.allocate(count, contiguous=True))
            arena = self.pool.slabs[int(self.pool.slab_of[blocks[0]])]
            for part, held in state.items():
                kind, _, layer = part.partition(".")
                if kind in ("keys", "values"):
                    getattr(arena, kind)[int(layer)] = held.contiguous().clone()
            new = np.where(table >= 0, blocks[table], -1)
            self.pool.incref(new[new >= 0])
            self.pool.decref(blocks)
            table = new
        self._block_table = _grow_table(table, 8)
        self._lengths = state["lengths"].long().cpu()

    # -------------------------------------------------------------------- one forward
    def _plan_write(self, span: KVSpan) -> PagedReadPlan:
        """Blocks of their own for all that a forward writes, and how its rows are read."""
        rows, starts = span.on_host(len(self._block_table))
        size, stops = self.pool.block_size, starts + span.width
        self._block_table = _grow_table(self._block_table, -(-int(stops.max()) // size))
        # Most rows have blocks of their own to write to already: nothing is done for those.
        reached = starts[:, None] // size + np.arange(-(-span.width // size) + 1)
        mine = np.take_along_axis(
            self._block_table[rows], np.minimum(reached, (stops[:, None] - 1) // size), 1
        )
        lacking = mine < 0
        lacking[~lacking] = self.pool.ref_counts[mine[~lacking]] > 1
        for line in np.flatnonzero(lacking.any(1)).tolist():
            self._reserve(int(rows[line]), int(starts[line]), int(stops[line]))
        at = starts[:, None] + np.arange(span.width)  # [N, T]
        blocks = np.take_along_axis(self._block_table[rows], at // size, 1)
        plan = PagedReadPlan(
            self.pool, self._block_table[rows][:, : -(-span.read_length // size)], span.read_length
        )
        plan.span, plan.starts = span, starts
        plan.write_slots = (
            self.pool.slab_of[blocks].ravel(),
            (self.pool.index_in_slab[blocks] * size + at % size).ravel(),
        )
        return plan

    def _reserve(self, row: int, start: int, stop: int) -> None:
        """Make the blocks of a row from `start` to `stop` its own."""
        size, line = self.pool.block_size, self._block_table[row]
        first, last = start // size, -(-stop // size)
        if start % size and self.pool.ref_counts[line[first]] > 1:
            old, (new,) = int(line[first]), self.pool.allocate(1)
            self.pool.copy_slots(old, new, start % size)
            self.pool.decref(np.array([old]))
            line[first] = new
        for place in range(first, last):
            # A block that was written in this step already, and committed by nobody, may be written again.
            if line[place] >= 0 and self.pool.ref_counts[line[place]] > 1:
                self.pool.decref(line[place : place + 1])
                line[place] = -1
        lacking = [place for place in range(first, last) if line[place] < 0]
        if lacking:
            together = len(lacking) * size >= _MIN_SLAB_SLOTS
            line[lacking] = self.pool.allocate(len(lacking), together)


def _grow_table(table: Array, blocks: int) -> Array:
    """A table with room for so many blocks a row, doubled where it had not."""
    have = table.shape[1]
    if have >= blocks:
        return table
    return np.pad(table, ((0, 0), (0, max(blocks, 2 * have) - have)), constant_values=-1)
