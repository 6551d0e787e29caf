"""Growing blocks of keys, values and optional attention scores, one per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["LayerBlock", "SlotBlocks"]

# Blocks grow by at least this many slots.
_GROWTH_STEP = 64


@dataclass(eq=False)
class LayerBlock:
    """The slots of all rows in one layer."""

    keys: Tensor  # [R, H, S, D]
    values: Tensor  # [R, H, S, E]
    score: Tensor  # [R, H, S] in float32; S is 0 without scores


class SlotBlocks:
    """One block per layer; the owner knows how many slots of a row are valid."""

    def __init__(self, scored: bool) -> None:
        self.blocks: dict[int, LayerBlock] = {}
        self._tensor_names = ("keys", "values", "score") if scored else ("keys", "values")

    @property
    def nbytes(self) -> int:
        """The memory of all blocks in bytes."""
        return sum(
            getattr(block, name).nbytes for block in self.blocks.values() for name in self._tensor_names
        )

    def ensure_capacity(self, layer: int, like: tuple[Tensor, Tensor], rows: int, slots: int) -> LayerBlock:
        """A layer's block, grown to at least so many rows and slots."""
        block = self.blocks.get(layer)
        if block is None:
            keys, values = (tensor.new_zeros(0, tensor.shape[1], 0, tensor.shape[3]) for tensor in like)
            score = torch.zeros(0, keys.shape[1], 0, device=keys.device)
            block = LayerBlock(keys, values, score)
        old_rows, old_slots = block.keys.shape[0], block.keys.shape[2]
        if old_rows < rows or old_slots < slots:
            new_rows = old_rows if old_rows >= rows else max(rows, 2 * old_rows)
            new_slots = (
                old_slots if old_slots >= slots else max(slots + _GROWTH_STEP, old_slots + old_slots // 2)
            )
            self._resize(block, new_rows, new_slots)
        self.blocks[layer] = block
        return block

    def shrink_to_fit(self, rows: int, slots: int) -> None:
        """Free memory that a long prompt or many rows took and that is no longer needed."""
        for block in self.blocks.values():
            if block.keys.shape[0] > 4 * (rows + 1) or block.keys.shape[2] > 2 * (slots + _GROWTH_STEP):
                try:
                    self._resize(block, rows, slots + _GROWTH_STEP if rows else 0)
                except (RuntimeError, MemoryError):
                    return  # without memory for the smaller copies the larger blocks stay

    def tensors(self) -> list[Tensor]:
        """The keys and values of all layers."""
        return [tensor for block in self.blocks.values() for tensor in (block.keys, block.values)]

    def _resize(self, block: LayerBlock, rows: int, slots: int) -> None:
        """Resize the tensors of a layer, all or none."""
        resized = {name: _pad_or_crop(getattr(block, name), rows, slots) for name in self._tensor_names}
        vars(block).update(resized)

    def select_rows(self, rows: Tensor, slots: int, layers: Iterable[int] | None = None) -> Self:
        """A copy of the first slots of rows [N] (host), of all layers or of the given ones."""
        other = type(self)("score" in self._tensor_names)
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        for layer in self.blocks if layers is None else layers:
            block = self.blocks[layer]
            at = rows.to(block.keys.device)
            other.blocks[layer] = LayerBlock(block.keys[:0], block.values[:0], block.score[:0])
            for name in self._tensor_names:
                setattr(other.blocks[layer], name, _pad_or_crop(getattr(block, name), num_rows, slots)[at])
        return other

    def append(self, other: Self, first: int, rows: int, slots: int) -> None:
        """Copy the rows of another one to the rows from `first` on."""
        for layer, source in other.blocks.items():  # all are grown before the first is written
            self.ensure_capacity(layer, (source.keys, source.values), first + rows, slots)
        for layer, source in other.blocks.items():
            for name in self._tensor_names:
                content = getattr(source, name)[:rows, :, :slots]
                target = getattr(self.blocks[layer], name)[first : first + len(content)]
                target[:, :, : content.shape[2]] = content

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for block in self.blocks.values():
            for name in ("keys", "values", "score"):
                setattr(block, name, getattr(block, name).to(device))

    def state(self, rows: int, slots: int) -> dict[str, Tensor]:
        """The first rows and slots of all blocks, by name."""
        return {
            f"{name}.{layer}": _pad_or_crop(getattr(block, name), rows, slots)
            for layer, block in self.blocks.items()
            for name in self._tensor_names
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""
        for key, tensor in state.items():
            name, _, layer = key.partition(".")
            if layer and name in self._tensor_names:
                empty = torch.zeros(len(tensor), tensor.shape[1], 0, device=tensor.device)
                block = self.blocks.setdefault(int(layer), LayerBlock(empty, empty, empty))
                setattr(block, name, tensor.clone())


def _pad_or_crop(block: Tensor, rows: int, slots: int) -> Tensor:
    """A copy of a block, cropped or padded with zeros."""
    other = block.new_zeros(rows, block.shape[1], slots, *block.shape[3:])
    copied_rows, copied_slots = min(rows, block.shape[0]), min(slots, block.shape[2])
    other[:copied_rows, :, :copied_slots] = block[:copied_rows, :, :copied_slots]
    return other
