"""Copies between the rows of blocks that are made completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CopyBuffers", "RowCopies", "RowCopy"]


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

    def reserve(self, number: int, shape: Sequence[int], like: Tensor) -> None:
        """Allocate the buffer of copy `number`, unless there is one of that shape."""
        key = (number, *shape, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)

    def get(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """The buffer of copy `number`."""
        return self._buffers[(number, *shape, like.dtype, like.device)]


class RowCopies:
    """Copies of rows in every one of some blocks [R, H, S, D]; once it is made, `run` allocates nothing."""

    def __init__(self, blocks: Sequence[Tensor], copies: Sequence[RowCopy]) -> None:
        self._blocks, self._copies, self._buffers = blocks, copies, CopyBuffers()
        self._indices: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for block in blocks if copies else ():
            if block.device not in self._indices:
                self._indices[block.device] = [
                    (copy.targets.to(block.device), copy.sources.to(block.device)) for copy in copies
                ]
            for number, copy in enumerate(copies):
                self._buffers.reserve(number, _shape(block, copy), block)

    @torch.no_grad()
    def run(self) -> None:
        """Make the copies."""
        for block in self._blocks if self._copies else ():
            contents, indices = [], self._indices[block.device]
            # Read everything before writing: the source of one copy may be the target of another.
            for number, (copy, (_, sources)) in enumerate(zip(self._copies, indices, strict=True)):
                content = self._buffers.get(number, _shape(block, copy), block)
                contents.append(torch.index_select(block[:, :, copy.slots], 0, sources, out=content))
            for copy, (targets, _), content in zip(self._copies, indices, contents, strict=True):
                block[:, :, copy.slots].index_copy_(0, targets, content)

    @property
    def num_slots(self) -> int:
        """The number of slots that are copied in each block."""
        return sum(len(copy.targets) * (copy.slots.stop - copy.slots.start) for copy in self._copies)


def _shape(block: Tensor, copy: RowCopy) -> tuple[int, ...]:
    """The shape of what a copy takes from a block."""
    return (len(copy.targets), block.shape[1], copy.slots.stop - copy.slots.start, *block.shape[3:])
