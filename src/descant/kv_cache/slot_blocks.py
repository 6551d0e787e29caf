"""Slots: blocks of keys, values and, where they are counted, votes, as tall and wide as rows need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["LayerBlock", "SlotBlocks"]

# Room is added in steps of at least this many slots.
_GROWTH_STEP = 64


@dataclass(eq=False)
class LayerBlock:
    """The slots of all rows in one layer."""

    keys: Tensor  # [R, H, S, D]
    values: Tensor  # [R, H, S, E]
    score: Tensor  # [R, H, S] in float32; S is 0 where none is kept


class SlotBlocks:
    """A block for every layer; how much of a row counts is for others to know."""

    def __init__(self, scored: bool) -> None:
        self.blocks: dict[int, LayerBlock] = {}
        self._tensor_names = ("keys", "values", "score") if scored else ("keys", "values")

    @property
    def nbytes(self) -> int:
        """What all blocks take in memory."""
        return sum(
            getattr(block, part).nbytes for block in self.blocks.values() for part in self._tensor_names
        )

    def ensure_capacity(self, layer: int, like: tuple[Tensor, Tensor], rows: int, slots: int) -> LayerBlock:
        """A layer's block with room for so many rows and slots."""
        block = self.blocks.get(layer)
        if block is None:
            keys, values = (one.new_zeros(0, one.shape[1], 0, one.shape[3]) for one in like)
            score = torch.zeros(0, keys.shape[1], 0, device=keys.device)
            block = self.blocks[layer] = LayerBlock(keys, values, score)
        tall, wide = block.keys.shape[0], block.keys.shape[2]
        if tall < rows or wide < slots:
            tall = tall if tall >= rows else max(rows, 2 * tall)
            wide = wide if wide >= slots else max(slots + _GROWTH_STEP, wide + wide // 2)
            self._resize(block, tall, wide)
        return block

    def shrink_to_fit(self, rows: int, slots: int) -> None:
        """Give back what a long prompt or many rows took that have gone."""
        for block in self.blocks.values():
            if block.keys.shape[0] > 4 * (rows + 1) or block.keys.shape[2] > 2 * (slots + _GROWTH_STEP):
                self._resize(block, rows, slots + _GROWTH_STEP if rows else 0)

    def _resize(self, block: LayerBlock, rows: int, slots: int) -> None:
        for part in self._tensor_names:
            setattr(block, part, _pad_or_crop(getattr(block, part), rows, slots))

    def select_rows(self, rows: Tensor, slots: int, layers: Iterable[int] | None = None) -> Self:
        """The same rows [N] (host) on their own, so many slots of them, of all layers or of some."""
        other = type(self)("score" in self._tensor_names)
        tall = int(rows.max()) + 1 if len(rows) else 0
        for layer in self.blocks if layers is None else layers:
            block = self.blocks[layer]
            at = rows.to(block.keys.device)
            other.blocks[layer] = LayerBlock(block.keys[:0], block.values[:0], block.score[:0])
            for part in self._tensor_names:
                setattr(other.blocks[layer], part, _pad_or_crop(getattr(block, part), tall, slots)[at])
        return other

    def append(self, other: Self, first: int, rows: int, slots: int) -> None:
        """Lay the rows of another one from row `first` on."""
        for layer, theirs in other.blocks.items():
            mine = self.ensure_capacity(layer, (theirs.keys, theirs.values), first + rows, slots)
            for part in self._tensor_names:
                block = _pad_or_crop(getattr(theirs, part), rows, slots)
                getattr(mine, part)[first : first + rows, :, :slots] = block.to(mine.keys.device)

    def to(self, device: torch.device | str) -> None:
        """Move all blocks."""
        for block in self.blocks.values():
            for part in ("keys", "values", "score"):
                setattr(block, part, getattr(block, part).to(device))

    def state(self, rows: int, slots: int) -> dict[str, Tensor]:
        """All blocks by name, so much of them."""
        return {
            f"{part}.{layer}": _pad_or_crop(getattr(block, part), rows, slots)
            for layer, block in self.blocks.items()
            for part in self._tensor_names
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave."""
        for name, block in state.items():
            part, _, layer = name.partition(".")
            if layer and part in self._tensor_names:
                none = torch.zeros(len(block), block.shape[1], 0, device=block.device)
                setattr(self.blocks.setdefault(int(layer), LayerBlock(none, none, none)), part, block.clone())


def _pad_or_crop(block: Tensor, rows: int, slots: int) -> Tensor:
    """A copy of a block, cut or filled up with zeros."""
    other = block.new_zeros(rows, block.shape[1], slots, *block.shape[3:])
    tall, wide = min(rows, block.shape[0]), min(slots, block.shape[2])
    other[:tall, :, :wide] = block[:tall, :, :wide]
    return other
