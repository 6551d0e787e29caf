"""Slots that a commit copies from rows to the rows of a block, in every layer or in none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from descant.kv_cache.row_copies import CopyBuffers
from descant.kv_cache.slot_blocks import LayerBlock

__all__ = ["SlotMove", "move_slots", "reserve_moves"]


class SlotMove(NamedTuple):
    """Slots of some rows of keys and values, and the rows of a block that get them packed."""

    source: tuple[Tensor, Tensor]  # [R, H, S, D] each
    rows: Tensor  # [N] rows of the source, on its device
    slots: Tensor | int  # [N, H, K] the slots of each head, or how many of the first slots
    heads: Tensor  # [H, 1] on the same device
    targets: Tensor  # [N] rows of the block, on the same device

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """The shape of what is copied from the keys or the values."""
        width = self.slots.shape[2] if isinstance(self.slots, Tensor) else min(self.slots, part.shape[2])
        return (len(self.rows), part.shape[1], width, part.shape[3])

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Copy the slots of the keys or the values to a buffer."""
        if isinstance(self.slots, Tensor):
            torch.ops.aten.index(part, [self.rows[:, None, None], self.heads, self.slots], out=out)
        else:
            torch.index_select(part[:, :, : out.shape[2]], 0, self.rows, out=out)


def reserve_moves(buffers: CopyBuffers, moves: Sequence[SlotMove]) -> None:
    """Allocate what the moves of one layer need."""
    for number, move in enumerate(moves):
        for side, part in enumerate(move.source):
            buffers.reserve(2 * number + side, move.shape(part), part)


@torch.no_grad()
def move_slots(buffers: CopyBuffers, moves: Sequence[SlotMove], block: LayerBlock) -> None:
    """Make the moves of one layer, from the block itself or from elsewhere, without an allocation."""
    contents = []
    # Read everything before writing: the source of one move may be the target of another.
    for number, move in enumerate(moves):
        for side, part in enumerate(move.source):
            content = buffers.get(2 * number + side, move.shape(part), part)
            move.gather(part, content)
            contents.append(content)
    for number, move in enumerate(moves):
        for side, target in enumerate((block.keys, block.values)):
            content = contents[2 * number + side]
            target[:, :, : content.shape[2]].index_copy_(0, move.targets, content)
