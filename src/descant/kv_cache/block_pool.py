"""The block pool of the paged cache: slabs of memory, block ids and reference counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import get_ident

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

# The growing slab starts with this many blocks and grows by a quarter, so little memory stays unused.
_MIN_GROWTH_BLOCKS = 16

# By name the columns with an entry for each block id, and the value of an id that is new.
_COLUMNS = {
    "ref_counts": 0, "slab_of": -1, "index_in_slab": 0, "reclaimable": 0, "is_idle": False,
    "_is_newly_idle": False,
}  # fmt: skip


class BlockSlab:
    """Memory for a number of blocks: by layer keys and values [H, slots, D], allocated at the first write."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.kv_tensors = self.keys, self.values

    @property
    def nbytes(self) -> int:
        """The memory of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))

    def ensure_capacity(
        self, tensors: dict[int, Tensor], layer: int, like: Tensor, block_size: int
    ) -> Tensor:
        """A layer's tensor, grown to all blocks; zero-filled, because stale slots must be finite."""
        slots = self.num_blocks * block_size
        tensor = tensors.get(layer)
        if tensor is None or tensor.shape[1] < slots:
            grown = like.new_zeros(like.shape[1], slots, like.shape[3])
            if tensor is not None:
                grown[:, : tensor.shape[1]] = tensor
            tensor = tensors[layer] = grown
        return tensor


class BlockPool:
    """Reference-counted blocks of `block_size` slots; sharing a block copies nothing.

    A prompt gets a slab of its own, freed with its last block. Tokens written one by one go to slab 0,
    which grows. Block `b` is block `index_in_slab[b]` of slab `slab_of[b]`.

    References may be marked as reclaimable: their owner gives them up when requests need blocks. A block
    that only such references hold is idle.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slabs: dict[int, BlockSlab] = {0: BlockSlab(0)}
        self.ref_counts: Array = np.zeros(0, dtype=np.int64)
        self.slab_of: Array = np.zeros(0, dtype=np.int64)
        self.index_in_slab: Array = np.zeros(0, dtype=np.int64)
        self.reclaimable: Array = np.zeros(0, dtype=np.int64)  # references of each block that are
        self.is_idle: Array = np.zeros(0, dtype=bool)
        self._is_newly_idle: Array = np.zeros(0, dtype=bool)  # since `take_newly_idle`
        self._num_reclaimable = 0
        self.copied_slots = 0  # slots copied on write; part of what bench/beams.py measures
        self._unused_ids: list[int] = []  # ids without memory
        self._free_blocks: list[int] = []  # unreferenced blocks of slab 0
        self._live_blocks: dict[int, int] = {}  # slab of a prompt -> its number of referenced blocks
        self._next_slab_id = 1
        self._user_thread: int | None = None  # that allocates
        self._released: deque[tuple[Array, bool]] = deque()  # references to be removed, with what they are

    @property
    def nbytes(self) -> int:
        """The memory of all slabs in bytes."""
        return sum(slab.nbytes for slab in self.slabs.values())

    @property
    def block_nbytes(self) -> int:
        """The memory of one block in all layers, in bytes; 0 before the first write."""
        slots = {
            (name, layer): tensor.nbytes // tensor.shape[1]
            for slab in self.slabs.values()
            for name, tensors in enumerate(slab.kv_tensors)
            for layer, tensor in tensors.items()
            if tensor.shape[1]
        }
        return self.block_size * sum(slots.values())

    def allocate(self, count: int, contiguous: bool = False) -> list[int]:
        """Free blocks, with a reference count of 1; `contiguous`: in a new slab of their own."""
        self._user_thread = get_ident()
        self._apply_released()
        if contiguous:
            slab_id, self._next_slab_id = self._next_slab_id, self._next_slab_id + 1
            self.slabs[slab_id] = BlockSlab(count)
            self._live_blocks[slab_id] = count
            blocks = self._assign_ids(slab_id, range(count))
        else:
            if len(self._free_blocks) < count:  # the tensors of slab 0 grow at the next write
                slab, first = self.slabs[0], self.slabs[0].num_blocks
                added = max(count - len(self._free_blocks), _MIN_GROWTH_BLOCKS, first // 4)
                slab.num_blocks += added  # first: no block may be given out twice, whatever happens next
                self._free_blocks += reversed(self._assign_ids(0, range(first, first + added)))
            blocks = [self._free_blocks.pop() for _ in range(count)]
        self.ref_counts[blocks] = 1
        return blocks

    def release(self, blocks: Array, *, is_reclaimable: bool) -> None:
        """Remove one reference per entry of an owner that is gone; any thread may call it.

        What refers to blocks may end in another thread, such as a result that a caller drops. The thread that
        uses the pool carries it out then, since counts must not change beside it.
        """
        self._released.append((blocks, is_reclaimable))
        if self._user_thread in (None, get_ident()):
            self._apply_released()

    def _apply_released(self) -> None:
        while self._released:
            blocks, is_reclaimable = self._released.popleft()
            if is_reclaimable:
                self.reclaimable -= np.bincount(blocks, minlength=len(self.ref_counts))
                self._num_reclaimable -= len(blocks)
                self.is_idle[blocks] = False
            self.decref(blocks)

    def incref(self, blocks: Array) -> None:
        """Add one reference per entry; a block may occur several times."""
        self.ref_counts += np.bincount(blocks, minlength=len(self.ref_counts))
        self.is_idle[blocks] = False

    def decref(self, blocks: Array) -> None:
        """Remove one reference per entry, and free the blocks without references."""
        if not len(blocks):
            return
        counts = np.bincount(blocks, minlength=len(self.ref_counts))
        if (counts > self.ref_counts).any():
            raise RuntimeError("a block was freed twice")
        self.ref_counts -= counts
        self._note_idle(counts)
        for block in np.flatnonzero((counts > 0) & (self.ref_counts == 0)).tolist():
            slab_id = int(self.slab_of[block])
            if slab_id == 0:
                self._free_blocks.append(block)
                continue
            self._unused_ids.append(block)
            self.slab_of[block] = -1
            self._live_blocks[slab_id] -= 1
            if not self._live_blocks[slab_id]:
                del self._live_blocks[slab_id], self.slabs[slab_id]
        if len(self._free_blocks) > 3 * self.slabs[0].num_blocks // 4:
            self._shrink()

    @property
    def num_idle(self) -> int:
        """The number of blocks that only reclaimable references hold."""
        self._apply_released()
        return int(np.count_nonzero(self.is_idle)) if self._num_reclaimable else 0

    def mark_reclaimable(self, blocks: Array) -> None:
        """Mark one reference per entry as reclaimable, until `release` removes it."""
        counts = np.bincount(blocks, minlength=len(self.ref_counts))
        self.reclaimable += counts
        self._num_reclaimable += len(blocks)
        self._note_idle(counts)

    def take_newly_idle(self) -> list[int]:
        """The idle blocks that have become so since the last call."""
        found = np.flatnonzero(self._is_newly_idle & self.is_idle).tolist()
        self._is_newly_idle[:] = False
        return found

    def _note_idle(self, changed: Array) -> None:
        """Find the idle blocks among those whose number of references has changed by `changed` [B]."""
        if self._num_reclaimable:
            idle = (changed > 0) & (self.reclaimable > 0) & (self.ref_counts == self.reclaimable)
            self.is_idle |= idle
            self._is_newly_idle |= idle

    def copy_slots(self, old: int, new: int, slots: int) -> None:
        """Copy the first slots of a block to another block, in every layer."""
        source, target = self.slabs[int(self.slab_of[old])], self.slabs[int(self.slab_of[new])]
        read_start = int(self.index_in_slab[old]) * self.block_size
        write_start = int(self.index_in_slab[new]) * self.block_size
        for source_tensors, target_tensors in zip(source.kv_tensors, target.kv_tensors, strict=True):
            for layer, tensor in source_tensors.items():
                like = tensor.unsqueeze(0)
                copied = target.ensure_capacity(target_tensors, layer, like, self.block_size)
                copied[:, write_start : write_start + slots] = tensor[:, read_start : read_start + slots]
        self.copied_slots += slots

    def _shrink(self) -> None:
        """Free the end of slab 0, behind its last referenced block."""
        slab = self.slabs[0]
        used = self.index_in_slab[(self.slab_of == 0) & (self.ref_counts > 0)]
        num_blocks = int(used.max()) + 1 if len(used) else 0
        if slab.num_blocks - num_blocks <= max(_MIN_GROWTH_BLOCKS, slab.num_blocks // 2):
            return  # not worth copying what stays
        slab.num_blocks = num_blocks
        dropped = [block for block in self._free_blocks if self.index_in_slab[block] >= num_blocks]
        self._free_blocks = [block for block in self._free_blocks if self.index_in_slab[block] < num_blocks]
        self._unused_ids += dropped
        self.slab_of[dropped] = -1
        for tensors in slab.kv_tensors:
            for layer, tensor in list(tensors.items()):
                if not num_blocks:
                    del tensors[layer]
                    continue
                try:
                    tensors[layer] = tensor[:, : num_blocks * self.block_size].clone()
                except (RuntimeError, MemoryError):
                    return  # without memory for a smaller copy the larger tensor stays

    def _assign_ids(self, slab_id: int, indices: Sequence[int]) -> list[int]:
        """Ids for the blocks at these indices of a slab."""
        lacking = len(indices) - len(self._unused_ids)
        if lacking > 0:
            first, added = len(self.ref_counts), max(lacking, len(self.ref_counts) // 2)
            for name, empty in _COLUMNS.items():
                column = getattr(self, name)
                grown = np.concatenate((column, np.full(added, empty, dtype=column.dtype)))
                setattr(self, name, grown)
            self._unused_ids += range(first, first + added)
        ids = [self._unused_ids.pop() for _ in indices]
        self.slab_of[ids], self.index_in_slab[ids] = slab_id, list(indices)
        return ids

    def to(self, device: torch.device | str) -> None:
        """Move all slabs."""
        for slab in self.slabs.values():
            for tensors in slab.kv_tensors:
                for layer, tensor in tensors.items():
                    tensors[layer] = tensor.to(device)
