"""The record of a run: what generate() returns besides tokens, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.records import Observation
from descant.core.rows import pick

__all__ = ["Layout", "Record"]


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


class _Lines(NamedTuple):
    """Which lines of the output an observation holds."""

    line: Tensor  # [N]
    row: Tensor  # [N] the fed row, in the lane, that each is of
    number: Tensor  # [N] of which new token
    which: Tensor | None  # [N] the line of `told.scores`; None: the row's own scores
    at: Tensor | None = None  # [N] after which of the row's drafts; None: after the row itself


class _Place(NamedTuple):
    """One row's states in one forward."""

    part: Mapping[str, Any]
    at: int
    line: int
    draft: int  # after which draft; 0: after the row itself


@dataclass
class Record:
    """Keeps what was asked for of every step, and lays it out as documented at the end.

    A row that has left is certain of the pad token from then on: score 0 for it, -inf for all else.
    """

    wants: frozenset[str]  # "scores", "logits", "hidden_states", "attentions"
    seen: list[Observation] = field(default_factory=list)

    def __call__(self, observation: Observation) -> None:
        """Keep one lane of a step."""
        self.seen.append(observation)

    def tensors(self, name: str, layout: Layout) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of every new token [lines, V]."""
        if name not in self.wants:
            return None
        blocks: list[Tensor] = []
        last = torch.full((layout.lines,), -1)
        for seen in self.seen:
            lines = _lines(seen, layout)
            last[lines.line] = lines.number
            told = seen.told.scores if seen.told is not None and name == "scores" else None
            source, at = getattr(seen, name), lines.row
            if told is not None and lines.which is not None:
                source, at = told, lines.which
            elif lines.at is None or source.shape[1] == 1:
                source = source[:, 0]
            else:
                at = lines.row * source.shape[1] + lines.at
                source = source.flatten(0, 1)
            for number in sorted(set(lines.number.tolist())):
                while len(blocks) <= number:
                    blocks.append(_certain(source, layout))
                here = (lines.number == number).nonzero().squeeze(1)
                blocks[number][lines.line[here].to(source.device)] = pick(source, at[here])
        # A row that took tokens back has been further than where it is.
        for number, block in enumerate(blocks):
            stale = (last < number).nonzero().squeeze(1).to(block.device)
            block[stale] = _certain(block, layout)[stale]
        return tuple(blocks[: int(last.max()) + 1])

    def states(self, name: str, layout: Layout) -> tuple[tuple[Tensor, ...], ...] | None:
        """Hidden states or attentions of every new token, a tuple of layers each, aligned as the prompts."""
        steps: list[list[_Place]] = []
        for seen in self.seen:
            for number, place in _places(seen, layout, name):
                while len(steps) <= number:
                    steps.append([])
                steps[number].append(place)
                for after in steps[number + 1 :]:  # taken back
                    after[:] = [one for one in after if one.line != place.line]
        while steps and not steps[-1]:
            steps.pop()
        if not steps:
            return None
        depth = len(steps[0][0].part[name])
        return tuple(
            tuple(_laid_out(places, name, layer, number, layout) for layer in range(depth))
            for number, places in enumerate(steps)
        )


def _lines(seen: Observation, layout: Layout) -> _Lines:
    """The lines that an observation holds; at its first choice a row stands for all of its request's."""
    rows, told = seen.rows, seen.told
    row = torch.arange(len(rows)) if told is None else told.rows
    slot = rows.slot if told is None else told.slot
    at = None if told is None else told.at
    number = (rows.length - rows.prompt)[row] + (0 if at is None else at)
    start = torch.tensor([layout.first[one] for one in rows.request[row].tolist()], dtype=torch.long)
    if told is not None:
        return _Lines(start + slot, row, number, torch.arange(len(row)), at)
    copies = torch.tensor([layout.copies[one] for one in rows.request.tolist()], dtype=torch.long)
    copies = torch.where(number == 0, copies, 1)
    whose = row.repeat_interleave(copies)
    place = torch.arange(len(whose)) - (copies.cumsum(0) - copies)[whose]  # which of its request's lines
    return _Lines(start[whose] + torch.where(copies > 1, 0, slot)[whose] + place, whose, number[whose], None)


def _certain(like: Tensor, layout: Layout) -> Tensor:
    """The scores of lines that have ended [lines, V]."""
    block = like.new_full((layout.lines, like.shape[-1]), -torch.inf)
    if layout.pad < block.shape[1]:
        block[:, layout.pad] = 0.0
    return block


def _places(seen: Observation, layout: Layout, name: str) -> Iterator[tuple[int, _Place]]:
    """Where the states of an observation's lines are, each with the number of its new token."""
    parts = [part for part in seen.output.states if name in part]
    found = {row: (part, at) for part in parts for at, row in enumerate(part["rows"].tolist())}
    lines, index = _lines(seen, layout), seen.output.place
    fed = lines.row if index is None else index[lines.row]
    drafts = torch.zeros_like(fed) if lines.at is None else lines.at
    columns = (lines.line, fed, lines.number, drafts)
    for line, row, number, draft in zip(*(one.tolist() for one in columns), strict=True):
        if row in found:
            yield number, _Place(*found[row], line, draft)


def _laid_out(places: list[_Place], name: str, layer: int, number: int, layout: Layout) -> Tensor:
    """One layer of one step [lines, ...]: queries aligned at the right, keys as far as the call's width."""
    queries = layout.width if number == 0 else 1
    keys = layout.width + number
    sample: Tensor = places[0].part[name][layer]
    attention = "attentions" in name
    cross = name == "cross_attentions"
    shape: tuple[int, ...]
    if attention:
        shape = (layout.lines, sample.shape[1], queries, sample.shape[-1] if cross else keys)
    else:
        shape = (layout.lines, queries, sample.shape[-1])
    block = sample.new_zeros(shape)
    for part, at, line, draft in places:
        tensor = part[name][layer]
        # What is tried after the row's own tokens is not its past yet.
        fed, past = int(part["fed"][at] - part["tried"][at]) + draft, int(part["cached"][at])
        first = max(fed - queries, 0)  # a draft stands behind what was fed before it
        size = fed - first
        if not attention:
            block[line, queries - size :] = tensor[at, first:fed]
        elif cross:
            block[line, :, queries - size :, : tensor.shape[-1]] = tensor[at, :, first:fed]
        else:
            block[line, :, queries - size :, keys - past - fed :] = tensor[at, :, first:fed, : past + fed]
    return block
