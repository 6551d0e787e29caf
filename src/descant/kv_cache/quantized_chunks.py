"""Chunks: what rows are made of that share what they hold, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from descant.kv_cache.quantizers import QuantizedTensor

__all__ = ["ChunkReadPlan", "ChunkRef", "QuantizedChunk", "truncate_chunks"]


@dataclass(frozen=True, eq=False)
class QuantizedChunk:
    """Some positions of a row in every layer, as codes; never changed, so that rows can share it."""

    length: int
    layers: Mapping[int, tuple[QuantizedTensor, QuantizedTensor]]  # keys and values

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)

    def to(self, device: torch.device | str) -> QuantizedChunk:
        """The same on a device."""
        layers = {
            layer: (
                QuantizedTensor(*(one.to(device) for one in keys)),
                QuantizedTensor(*(one.to(device) for one in values)),
            )
            for layer, (keys, values) in self.layers.items()
        }
        return QuantizedChunk(self.length, layers)


class ChunkRef(NamedTuple):
    """A chunk in a row, and how many of its positions count there."""

    chunk: QuantizedChunk
    used_length: int


class ChunkCopy(NamedTuple):
    """Positions that come from one place of what was decoded and go to one place of some lines."""

    rows: slice
    target: slice
    source: slice


@dataclass(frozen=True, eq=False)
class ChunkReadPlan:
    """How lines of pieces are read: each chunk is decoded once, whoever shares it."""

    base_lengths: Sequence[int]  # how many positions each line has
    chunks: Sequence[QuantizedChunk]  # what is decoded, in that order
    copies: Sequence[ChunkCopy] | None  # what goes where then; None: one after the other they are the lines

    @classmethod
    def from_rows(cls, lines: Sequence[Sequence[ChunkRef]]) -> Self:
        """That of lines."""
        return cls([sum(piece.used_length for piece in pieces) for pieces in lines], *_plan_copies(lines))

    @property
    def is_uniform(self) -> bool:
        """Whether lines have equally many positions."""
        return min(self.base_lengths) == max(self.base_lengths)

    @property
    def total_length(self) -> int:
        """How many positions are decoded."""
        return sum(chunk.length for chunk in self.chunks)


def truncate_chunks(pieces: Sequence[ChunkRef], length: int) -> tuple[ChunkRef, ...]:
    """The pieces of no more than so many positions."""
    kept = []
    for chunk, used in pieces:
        if length > 0:
            kept.append(ChunkRef(chunk, min(used, length)))
        length -= used
    return tuple(kept)


def _plan_copies(lines: Sequence[Sequence[ChunkRef]]) -> tuple[list[QuantizedChunk], list[ChunkCopy] | None]:
    """Which chunks lines are made of, each once, and what goes where when they are decoded in that order."""
    places: dict[QuantizedChunk, int] = {}
    total = 0
    runs: list[tuple[int, int, int, int]] = []  # line, from, to, length
    for line, pieces in enumerate(lines):
        into, open_ = 0, False
        for chunk, used in pieces:
            if chunk not in places:
                places[chunk] = total
                total += chunk.length
            out_of = places[chunk]
            if open_ and runs[-1][1] + runs[-1][3] == out_of:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + used)
            else:
                runs.append((line, out_of, into, used))
            into, open_ = into + used, True
    size = total // max(len(lines), 1)
    if total == size * len(lines) and runs == [(line, line * size, 0, size) for line in range(len(lines))]:
        return list(places), None
    shared: dict[tuple[int, int, int], list[int]] = {}
    for line, *run in runs:
        shared.setdefault((run[0], run[1], run[2]), []).append(line)
    moves = [
        ChunkCopy(some, slice(into, into + length), slice(out_of, out_of + length))
        for (out_of, into, length), which in shared.items()
        for some in _contiguous_slices(which)
    ]
    return list(places), moves


def _contiguous_slices(numbers: Sequence[int]) -> Iterator[slice]:
    """Ascending numbers as slices."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield slice(numbers[begin], numbers[end - 1] + 1)
            begin = end
