"""The record of a run: what generate() returns besides tokens, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from descant.step import Observation

__all__ = ["Layout", "Trace"]


@dataclass(frozen=True)
class Layout:
    """How rows of the table map to lines of the output: request `r`, slot `s` is line `first[r] + s`."""

    first: Mapping[int, int]
    copies: Mapping[int, int]  # lines a request
    pad: int  # what a row that has ended is certain to say
    width: int  # of the padded prompts

    @property
    def lines(self) -> int:
        """How many lines the output has."""
        return sum(self.copies.values())

    def places(self, request: Tensor, slot: Tensor, first_step: bool) -> tuple[Tensor, Tensor]:
        """Lines of the output and the fed row each takes its content from; a first step stands for all."""
        start = torch.tensor([self.first[one] for one in request.tolist()])
        if not first_step:
            return start + slot, torch.arange(len(request))
        copies = torch.tensor([self.copies[one] for one in request.tolist()])
        rows = torch.arange(len(request)).repeat_interleave(copies)
        place = torch.arange(len(rows)) - (copies.cumsum(0) - copies)[rows]  # which of its request's lines
        return start[rows] + place, rows


@dataclass
class Trace:
    """Keeps what was asked for of every step, and lays it out as documented at the end.

    A row that has left is certain of the pad token from then on: score 0 for it, -inf for all else.
    """

    wants: frozenset[str]  # "scores", "logits", "hidden_states", "attentions"
    steps: list[list[Observation]] = field(default_factory=list)

    def begin(self) -> None:
        """A new step."""
        self.steps.append([])

    def __call__(self, observation: Observation) -> None:
        """Keep one lane of the step at hand."""
        self.steps[-1].append(observation)

    def tensors(self, name: str, layout: Layout) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of every step [lines, V]."""
        if name not in self.wants:
            return None
        out = []
        for number, observations in enumerate(self.steps):
            sample = getattr(observations[0], name)
            block = sample.new_full((layout.lines, sample.shape[-1]), -torch.inf)
            if layout.pad < block.shape[1]:
                block[:, layout.pad] = 0.0
            for seen in observations:
                lines, rows = layout.places(seen.rows.request, seen.rows.slot, number == 0)
                block[lines] = getattr(seen, name)[rows, 0]
            out.append(block)
        return tuple(out)

    def states(self, name: str, layout: Layout) -> tuple[tuple[Tensor, ...], ...] | None:
        """Hidden states or attentions of every step, a tuple of layers each, aligned as the prompts."""
        out = []
        for number, observations in enumerate(self.steps):
            parts = [part for seen in observations for part in seen.output.states if name in part]
            if not parts:
                return None
            rows = observations[0].rows
            depth = len(parts[0][name])
            out.append(
                tuple(
                    _laid_out([(part, part[name][layer]) for part in parts], rows, layout, number, name)
                    for layer in range(depth)
                )
            )
        return tuple(out)


def _laid_out(parts: list[tuple[Any, Tensor]], rows: Any, layout: Layout, number: int, name: str) -> Tensor:
    """One layer of one step [lines, ...]: queries aligned at the right, keys as far as the call's width."""
    queries = layout.width if number == 0 else 1
    keys = layout.width + number
    sample = parts[0][1]
    attention = "attentions" in name
    cross = name == "cross_attentions"
    shape: tuple[int, ...]
    if attention:
        shape = (layout.lines, sample.shape[1], queries, sample.shape[-1] if cross else keys)
    else:
        shape = (layout.lines, queries, sample.shape[-1])
    block = sample.new_zeros(shape)
    for part, tensor in parts:
        index = part["rows"]
        lines, source = layout.places(rows.request[index], rows.slot[index], number == 0)
        for line, at in zip(lines.tolist(), source.tolist(), strict=True):
            fed, past = int(part["fed"][at]), int(part["cached"][at])
            if not attention:
                block[line, queries - fed :] = tensor[at, :fed]
            elif cross:
                block[line, :, queries - fed :, : tensor.shape[-1]] = tensor[at, :, :fed]
            else:
                block[line, :, queries - fed :, keys - past - fed :] = tensor[at, :, :fed, : past + fed]
    return block
