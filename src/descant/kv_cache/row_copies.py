"""Copies between the rows of blocks that are made completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CopyBuffers", "RowCopies", "RowCopy"]

# A view of slots of a block [R, H, S, D], the rows that are written and read [N], and a buffer [N, H, S, D].
_BlockCopy = tuple[Tensor, Tensor, Tensor, Tensor]


class RowCopy(NamedTuple):
    """Slots that are copied from some rows of a block to others."""

    targets: Tensor  # [N] (host)
    sources: Tensor  # [N] (host)
    slots: slice


class CopyBuffers:
    """Buffers for copies, allocated before the first write and shared by all blocks of one shape.

    A copy that runs out of memory half-way would leave some layers copied and others not.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def reserve(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """The buffer of copy `number`, allocated unless there is one of that shape."""
        key = (number, *shape, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)
        return self._buffers[key]

    def get(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """The buffer of copy `number`."""
        return self._buffers[(number, *shape, like.dtype, like.device)]


class RowCopies:
    """Copies of rows in every one of some blocks [R, H, S, D]; once it is made, `run` allocates no memory."""

    def __init__(self, blocks: Sequence[Tensor], copies: Sequence[RowCopy]) -> None:
        self.num_slots = sum(  # slots that are copied in each block
            len(copy.targets) * (copy.slots.stop - copy.slots.start) for copy in copies
        )
        self._blocks: list[list[_BlockCopy]] = []
        buffers, indices = CopyBuffers(), {}
        for block in blocks if copies else ():
            device = block.device
            if device not in indices:
                indices[device] = [(copy.targets.to(device), copy.sources.to(device)) for copy in copies]
            block_copies = []
            for number, (copy, (targets, sources)) in enumerate(zip(copies, indices[device], strict=True)):
                slots = block.narrow(2, copy.slots.start, copy.slots.stop - copy.slots.start)
                shape = (targets.shape[0], *slots.shape[1:])
                block_copies.append((slots, targets, sources, buffers.reserve(number, shape, block)))
            self._blocks.append(block_copies)

    def run(self) -> None:
        """Make the copies."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.run()
            return
        for block_copies in self._blocks:
            # Read everything before writing: the source of one copy may be the target of another.
            for slots, _, sources, content in block_copies:
                torch.index_select(slots, 0, sources, out=content)
            for slots, targets, _, content in block_copies:
                slots.index_copy_(0, targets, content)
