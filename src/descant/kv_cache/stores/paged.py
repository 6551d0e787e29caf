"""The paged cache: rows are lists of reference-counted blocks, which forks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array, KVSpan
from descant.kv_cache.attention.packed_span import PackedGroup, PackedSpan
from descant.kv_cache.attention.shared_prefix_attention import PagedReadPlan, paged_proxies
from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.stores.block_store import Store, Workload

# A write of at least this many slots gets a contiguous slab of its own.
_MIN_SLAB_SLOTS = 512


class PagedStore(Store):
    """Keys and values in shared, reference-counted blocks (Kwon et al. 2023, PagedAttention).

    Forks and reorders change block tables only. A row that writes into a shared block gets a copy of that
    block. Attention reads a shared prefix once for all its rows. Slot `p` of a row is its position `p`.
    """

    def __init__(self, block_size: int = 16, pool: BlockPool | None = None) -> None:
        super().__init__()
        self.pool = BlockPool(block_size) if pool is None else pool
        self._block_table: Array = np.full((0, 8), -1, dtype=np.int64)  # [R, M] block ids, -1: none
        self._plan: PagedReadPlan | None = None
        self.is_reclaimable = False  # whether its references are marked so

    @classmethod
    def of_blocks(cls, pool: BlockPool, blocks: Array) -> Self:
        """A store with one row of these full blocks [M], which it shares."""
        store = cls(pool=pool)
        store._block_table = _grow_table(blocks[None].copy(), 8)  # writes change it
        store._lengths = torch.tensor([len(blocks) * pool.block_size])
        pool.incref(blocks)
        return store

    def __del__(self) -> None:
        if hasattr(self, "is_reclaimable"):
            self.pool.release(self.referenced_blocks(), is_reclaimable=self.is_reclaimable)

    def mark_reclaimable(self) -> None:
        """Mark its references as reclaimable; its rows must not change after that."""
        self.pool.mark_reclaimable(self.referenced_blocks())
        self.is_reclaimable = True

    @property
    def nbytes(self) -> int:
        """The memory of the pool in bytes, shared with all stores on it."""
        return self.pool.nbytes

    @property
    def copied_slots(self) -> int:
        """The number of slots copied on write; part of what bench/beams.py measures."""
        return self.pool.copied_slots

    def count_slots(self, workload: Workload) -> int | None:
        """The slots of the rows of a workload, whose prompts are shared."""
        num_shared = (workload.num_rows - workload.num_prefilled) * workload.prompt_length
        return workload.num_fed * workload.final_length - num_shared

    def referenced_blocks(self) -> Array:
        """The blocks of all rows, one entry per reference."""
        return self._block_table[self._block_table >= 0]

    def block_ids(self, rows: Array) -> Array:
        """The blocks of rows [N] in order [N, M]; -1: none."""
        return np.asarray(self._block_table[rows])

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        empty = np.full((rows, self._block_table.shape[1]), -1, dtype=np.int64)
        self._block_table = np.concatenate((self._block_table, empty))
        super().extend(rows)
        self._plan = None

    def prepare_commit(self, parents: Tensor | None, lengths: Tensor) -> Callable[[], None]:
        """A commit that changes block tables only."""
        old = self._block_table
        new = old if parents is None else old[parents.numpy()]
        num_blocks = -(-lengths.numpy() // self.pool.block_size)
        beyond = (np.arange(new.shape[1]) >= num_blocks[:, None]) & (new >= 0)
        changes = parents is not None or bool(beyond.any())
        new = np.where(beyond, -1, new) if changes else old

        def commit() -> None:
            if changes:
                # New references come first, so that no block is freed in between.
                self.pool.incref(new[new >= 0])
                self.pool.decref(old[old >= 0])
                self._block_table = new
            self._lengths, self._plan = lengths, None

        return commit

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Any, Any]:
        """Write [N, H, T, D] at the span; returns proxies for the slots of its rows [N, H, S, D]."""
        plan = self._plan
        if plan is None or plan.span is not span:
            plan = self._plan = self._plan_write(span)
        self._write(layer, key, value, plan)
        if span.is_first_write:
            return key, value
        return paged_proxies(plan, layer, key, value)

    def write_packed(self, layer: int, key: Tensor, value: Tensor, span: PackedSpan) -> None:
        """Write the keys and values [1, H, P, D] of the tokens of several rows."""
        self._write(layer, key, value, self._packed_plan(span))

    def reserve_slots(self, span: PackedSpan) -> tuple[Array, Array]:
        """The slab and the slot in it of each token of a forward [P], in blocks that only its row has."""
        slots = self._packed_plan(span).write_slots
        assert slots is not None
        return slots

    def read_group(self, layer: int, group: PackedGroup) -> tuple[Any, Any]:
        """The keys and values [G, H, S, D] of a group of rows; proxies if they share a prefix."""
        plan = group.memo.get("plan")
        if plan is None:
            plan = self._plan_read(group.rows, group.num_slots)
            plan.starts, plan.stops = group.starts, group.stops
            group.memo["plan"] = plan
        if group.width == 1 and plan.shared_segments:
            return paged_proxies(plan, layer, *(plan.any_tensor(name, layer) for name in ("keys", "values")))
        return plan.gather("keys", layer), plan.gather("values", layer)

    def _write(self, layer: int, key: Tensor, value: Tensor, plan: PagedReadPlan) -> None:
        """Write [N, H, T, D] where a plan says."""
        for name, new in (("keys", key), ("values", value)):
            for slab_id, positions, slots in plan.writes_by_slab(key.device):
                slab = self.pool.slabs[slab_id]
                tensor = slab.ensure_capacity(getattr(slab, name), layer, new, self.pool.block_size)
                flat = new.transpose(0, 1).flatten(1, 2)  # [H, N * T, D]
                tensor[:, slots] = flat if positions is None else flat[:, positions]

    # -------------------------------------------------------------------- whole rows
    @property
    def layers(self) -> Sequence[int]:
        """The layers that were written."""
        return sorted({layer for slab in self.pool.slabs.values() for layer in slab.keys})

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The committed keys and values [N, H, S, D] of rows [N] (host); zero behind a row's length."""
        lengths = self._lengths[rows]
        stop = int(lengths.max()) if len(rows) else 0
        plan = PagedReadPlan(self.pool, self._block_table[rows.numpy()], stop)
        keys, values = plan.gather("keys", layer), plan.gather("values", layer)
        if bool((lengths < stop).any()):  # behind a row's end there are slots of other rows
            behind = (torch.arange(stop) >= lengths[:, None])[:, None, :, None].to(keys.device)
            keys, values = keys.masked_fill(behind, 0), values.masked_fill(behind, 0)
        return keys, values

    def select(self, rows: Tensor) -> Self:
        """A new store with these rows [N] (host), which shares their blocks."""
        other = type(self)(pool=self.pool)
        # Uncommitted blocks are left out.
        num_blocks = -(-self._lengths[rows].numpy() // self.pool.block_size)
        table = self._block_table[rows.numpy()]
        other._block_table = np.where(np.arange(table.shape[1]) < num_blocks[:, None], table, -1)
        other._lengths = self._lengths[rows].clone()
        self.pool.incref(other.referenced_blocks())
        return other

    def join(self, other: Self) -> None:
        """Append the rows of another store: their blocks, or copies if its pool is another; it is emptied."""
        if other.pool is not self.pool:
            other = self._copy_to_pool(other)
        table = _grow_table(self._block_table, other._block_table.shape[1])
        added = np.full((len(other), table.shape[1]), -1, dtype=np.int64)
        added[:, : other._block_table.shape[1]] = other._block_table
        self._block_table = np.concatenate((table, added))
        self._lengths = torch.cat((self._lengths, other._lengths))
        other._block_table, other._lengths = other._block_table[:0], other._lengths[:0]
        self._plan = None

    def _copy_to_pool(self, other: Self) -> Self:
        """A copy of a store in this store's pool; rows share blocks as before, if they have the same size."""
        copied = type(self)(pool=self.pool)
        if other.pool.block_size == self.pool.block_size:
            copied.load(other.state())
        elif len(other):
            rows, size = torch.arange(len(other)), int(other.lengths.max())
            copied.extend(len(other))
            span = KVSpan(None, 0, size, size)
            for layer in other.layers:
                copied.update(layer, *other.read(layer, rows), span)
            copied.commit(None, other.lengths)
        return copied

    def to(self, device: torch.device | str) -> None:
        """Move all blocks of the pool, also for the stores that share it."""
        self.pool.to(device)
        self._plan = None

    def state(self) -> dict[str, Tensor]:
        """Block table, lengths, and by layer every referenced block once [H, slots, D]."""
        num_blocks = -(-self._lengths.numpy() // self.pool.block_size)
        table = np.where(np.arange(self._block_table.shape[1]) < num_blocks[:, None], self._block_table, -1)
        blocks, index = np.unique(table[table >= 0], return_inverse=True)
        saved_table = np.full(table.shape, -1, dtype=np.int64)
        saved_table[table >= 0] = index
        max_blocks = int(num_blocks.max()) if len(num_blocks) else 0
        state = {
            "lengths": self._lengths.clone(),
            "table": torch.from_numpy(saved_table[:, :max_blocks].copy()),
        }
        plan = PagedReadPlan(self.pool, blocks[None, :], len(blocks) * self.pool.block_size)
        for name in ("keys", "values"):
            layers = {layer for slab in self.pool.slabs.values() for layer in getattr(slab, name)}
            for layer in sorted(layers) if len(blocks) else ():
                state[f"{name}.{layer}"] = plan.gather(name, layer)[0].contiguous().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state` into an empty store."""
        table = state["table"].cpu().numpy()
        count = int(table.max()) + 1 if table.size else 0
        if count:
            content = {
                name: tensor.contiguous().clone()
                for name, tensor in state.items()
                if name.startswith(("keys.", "values."))
            }
            blocks = np.asarray(self.pool.allocate(count, contiguous=True))
            slab = self.pool.slabs[int(self.pool.slab_of[blocks[0]])]
            for name, tensor in content.items():
                kind, _, layer = name.partition(".")
                getattr(slab, kind)[int(layer)] = tensor
            table = np.where(table >= 0, blocks[table], -1)
            self.pool.incref(table[table >= 0])
            self.pool.decref(blocks)
        self._block_table = _grow_table(table, 8)
        self._lengths = state["lengths"].long().cpu()

    # -------------------------------------------------------------------- one forward
    def _plan_write(self, span: KVSpan) -> PagedReadPlan:
        """Make every block that a forward writes exclusive to its row, and plan how its rows are read."""
        rows, starts = span.on_host(len(self._block_table))
        stops = starts + span.width
        self._make_exclusive(rows, starts, stops)
        plan = self._plan_read(rows, span.read_length)
        plan.span, plan.starts, plan.stops = span, starts, stops
        positions = starts[:, None] + np.arange(span.width)  # [N, T]
        blocks = np.take_along_axis(self._block_table[rows], positions // self.pool.block_size, 1)
        plan.write_slots = self._locate_slots(blocks, positions)
        return plan

    def _packed_plan(self, span: PackedSpan) -> PagedReadPlan:
        """The same for the tokens of a packed forward, which are read by group; one for all layers."""
        plan: PagedReadPlan | None = span.memo.get("plan")
        if plan is None:
            self._make_exclusive(span.rows, span.starts, span.starts + span.widths)
            plan = span.memo["plan"] = PagedReadPlan(self.pool, self._block_table[:0], 0)
            blocks = self._block_table[span.rows[span.token_rows], span.positions // self.pool.block_size]
            plan.write_slots = self._locate_slots(blocks, span.positions)
        return plan

    def _plan_read(self, rows: Array, read_length: int) -> PagedReadPlan:
        """The plan to read rows up to a slot."""
        table = self._block_table[rows][:, : -(-read_length // self.pool.block_size)]
        return PagedReadPlan(self.pool, table, read_length)

    def _locate_slots(self, blocks: Array, positions: Array) -> tuple[Array, Array]:
        """The slab and the slot in it of positions, which are in these blocks; both flat."""
        size = self.pool.block_size
        slots = self.pool.index_in_slab[blocks] * size + positions % size
        return self.pool.slab_of[blocks].ravel(), slots.ravel()

    def _make_exclusive(self, rows: Array, starts: Array, stops: Array) -> None:
        """Make the blocks of rows from `starts` to `stops` [N] exclusive to each."""
        size, width = self.pool.block_size, int((stops - starts).max())
        self._block_table = _grow_table(self._block_table, -(-int(stops.max()) // size))
        # Most rows already have exclusive blocks to write to and are skipped.
        block_index = starts[:, None] // size + np.arange(-(-width // size) + 1)
        block_index = np.minimum(block_index, (stops[:, None] - 1) // size)
        written = np.take_along_axis(self._block_table[rows], block_index, 1)
        lacking = written < 0
        lacking[~lacking] = self.pool.ref_counts[written[~lacking]] > 1
        for index in np.flatnonzero(lacking.any(1)).tolist():
            self._reserve(int(rows[index]), int(starts[index]), int(stops[index]))

    def _reserve(self, row: int, start: int, stop: int) -> None:
        """Make the blocks of a row from position `start` to `stop` exclusive to it."""
        size, blocks = self.pool.block_size, self._block_table[row]
        first, last = start // size, -(-stop // size)
        if start % size and self.pool.ref_counts[blocks[first]] > 1:
            old, (new,) = int(blocks[first]), self.pool.allocate(1)
            try:
                self.pool.copy_slots(old, new, start % size)
            except BaseException:
                self.pool.decref(np.array([new]))
                raise
            self.pool.decref(np.array([old]))
            blocks[first] = new
        for index in range(first, last):
            # A block with one reference was written earlier in this step, and may be written again.
            if blocks[index] >= 0 and self.pool.ref_counts[blocks[index]] > 1:
                self.pool.decref(blocks[index : index + 1])
                blocks[index] = -1
        lacking = [index for index in range(first, last) if blocks[index] < 0]
        if lacking:
            contiguous = len(lacking) * size >= _MIN_SLAB_SLOTS
            blocks[lacking] = self.pool.allocate(len(lacking), contiguous)


def _grow_table(table: Array, num_blocks: int) -> Array:
    """A table with at least so many columns, doubled where it grows."""
    columns = table.shape[1]
    if columns >= num_blocks:
        return table
    return np.pad(table, ((0, 0), (0, max(num_blocks, 2 * columns) - columns)), constant_values=-1)
