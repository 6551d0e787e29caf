"""Immutable quantized chunks that rows share, and the plan to decode them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from descant.kv_cache.quantizers import QuantizedTensor

__all__ = ["ChunkReadPlan", "ChunkRef", "QuantizedChunk", "truncate_chunks"]


@dataclass(frozen=True, eq=False)
class QuantizedChunk:
    """Consecutive positions of a row in every layer, quantized; immutable, so rows can share it."""

    length: int
    layers: Mapping[int, tuple[QuantizedTensor, QuantizedTensor]]  # keys and values

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def to(self, device: torch.device | str) -> QuantizedChunk:
        """A copy on a device."""
        layers = {
            layer: (
                QuantizedTensor(*(tensor.to(device) for tensor in keys)),
                QuantizedTensor(*(tensor.to(device) for tensor in values)),
            )
            for layer, (keys, values) in self.layers.items()
        }
        return QuantizedChunk(self.length, layers)


class ChunkRef(NamedTuple):
    """A chunk in a row, and how many of its positions the row uses."""

    chunk: QuantizedChunk
    used_length: int


class ChunkCopy(NamedTuple):
    """A slice of the decoded positions, copied to a slice of positions of some rows."""

    rows: slice
    target: slice
    source: slice


@dataclass(frozen=True, eq=False)
class ChunkReadPlan:
    """How the chunks of rows are decoded: each distinct chunk once."""

    base_lengths: Sequence[int]  # the number of positions in chunks, by row
    chunks: Sequence[QuantizedChunk]  # the chunks to decode, in order
    copies: Sequence[ChunkCopy] | None  # copies to rows; None: the decoded chunks are the rows in order

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[ChunkRef]]) -> Self:
        """The plan for rows of chunks."""
        return cls([sum(ref.used_length for ref in refs) for refs in rows], *_plan_copies(rows))

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same number of positions."""
        return min(self.base_lengths) == max(self.base_lengths)

    @property
    def total_length(self) -> int:
        """The number of decoded positions."""
        return sum(chunk.length for chunk in self.chunks)


def truncate_chunks(refs: Sequence[ChunkRef], length: int) -> tuple[ChunkRef, ...]:
    """The chunks of a row cut to `length` positions."""
    truncated = []
    for chunk, used in refs:
        if length > 0:
            truncated.append(ChunkRef(chunk, min(used, length)))
        length -= used
    return tuple(truncated)


def _plan_copies(rows: Sequence[Sequence[ChunkRef]]) -> tuple[list[QuantizedChunk], list[ChunkCopy] | None]:
    """The distinct chunks of rows in decoding order, and the copies from decoded positions to rows."""
    offsets: dict[QuantizedChunk, int] = {}  # chunk -> its first decoded position
    total = 0
    runs: list[tuple[int, int, int, int]] = []  # row, source, target, length
    for row, refs in enumerate(rows):
        target, has_run = 0, False
        for chunk, used in refs:
            if chunk not in offsets:
                offsets[chunk] = total
                total += chunk.length
            source = offsets[chunk]
            if has_run and runs[-1][1] + runs[-1][3] == source:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + used)
            else:
                runs.append((row, source, target, used))
            target, has_run = target + used, True
    size = total // max(len(rows), 1)
    if total == size * len(rows) and runs == [(row, row * size, 0, size) for row in range(len(rows))]:
        return list(offsets), None
    rows_by_run: dict[tuple[int, int, int], list[int]] = {}
    for row, source, target, length in runs:
        rows_by_run.setdefault((source, target, length), []).append(row)
    copies = [
        ChunkCopy(row_slice, slice(target, target + length), slice(source, source + length))
        for (source, target, length), run_rows in rows_by_run.items()
        for row_slice in _contiguous_slices(run_rows)
    ]
    return list(offsets), copies


def _contiguous_slices(numbers: Sequence[int]) -> Iterator[slice]:
    """Ascending numbers as slices of consecutive numbers."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield slice(numbers[begin], numbers[end - 1] + 1)
            begin = end
