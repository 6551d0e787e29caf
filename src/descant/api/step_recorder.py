"""The record of a run: what generate() returns besides tokens, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.records import Observation
from descant.core.rows import index_rows

__all__ = ["OutputLayout", "StepRecorder"]


@dataclass(frozen=True)
class OutputLayout:
    """How rows of the table map to lines of the output: request `r`, slot `s` is line `first[r] + s`."""

    first_lines: Mapping[int, int]
    lines_per_request: Mapping[int, int]  # lines a request
    pad_token_id: int  # what a row that has ended is certain to say
    prompt_width: int  # of the padded prompts

    @property
    def num_lines(self) -> int:
        """How many lines the output has."""
        return sum(self.lines_per_request.values())


class _OutputLines(NamedTuple):
    """Which lines of the output an observation holds."""

    line: Tensor  # [N]
    row: Tensor  # [N] the fed row, in the lane, that each is of
    token_index: Tensor  # [N] of which new token
    score_line: Tensor | None  # [N] the line of `told.scores`; None: the row's own scores
    draft_index: Tensor | None = None  # [N] after which of the row's drafts; None: after the row itself


class _StateRef(NamedTuple):
    """One row's states in one forward."""

    forward_states: Mapping[str, Any]
    row_index: int
    line: int
    draft_index: int  # after which draft; 0: after the row itself


@dataclass
class StepRecorder:
    """Keeps what was asked for of every step, and lays it out as documented at the end.

    A row that has left is certain of the pad token from then on: score 0 for it, -inf for all else.
    """

    output_names: frozenset[str]  # "scores", "logits", "hidden_states", "attentions"
    observations: list[Observation] = field(default_factory=list)

    def __call__(self, observation: Observation) -> None:
        """Keep one lane of a step."""
        self.observations.append(observation)

    def step_tensors(self, name: str, layout: OutputLayout) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of every new token [lines, V]."""
        if name not in self.output_names:
            return None
        blocks: list[Tensor] = []
        last = torch.full((layout.num_lines,), -1)
        for seen in self.observations:
            lines = _map_lines(seen, layout)
            last[lines.line] = lines.token_index
            told = (
                seen.recorded_lines.scores if seen.recorded_lines is not None and name == "scores" else None
            )
            source, at = getattr(seen, name), lines.row
            if told is not None and lines.score_line is not None:
                source, at = told, lines.score_line
            elif lines.draft_index is None or source.shape[1] == 1:
                source = source[:, 0]
            else:
                at = lines.row * source.shape[1] + lines.draft_index
                source = source.flatten(0, 1)
            for number in sorted(set(lines.token_index.tolist())):
                while len(blocks) <= number:
                    blocks.append(_finished_row_scores(source, layout))
                here = (lines.token_index == number).nonzero().squeeze(1)
                blocks[number][lines.line[here].to(source.device)] = index_rows(source, at[here])
        # A row that took tokens back has been further than where it is.
        for number, block in enumerate(blocks):
            stale = (last < number).nonzero().squeeze(1).to(block.device)
            block[stale] = _finished_row_scores(block, layout)[stale]
        return tuple(blocks[: int(last.max()) + 1])

    def states(self, name: str, layout: OutputLayout) -> tuple[tuple[Tensor, ...], ...] | None:
        """Hidden states or attentions of every new token, a tuple of layers each, aligned as the prompts."""
        steps: list[list[_StateRef]] = []
        for seen in self.observations:
            for number, place in _locate_states(seen, layout, name):
                while len(steps) <= number:
                    steps.append([])
                steps[number].append(place)
                for after in steps[number + 1 :]:  # taken back
                    after[:] = [one for one in after if one.line != place.line]
        while steps and not steps[-1]:
            steps.pop()
        if not steps:
            return None
        depth = len(steps[0][0].forward_states[name])
        return tuple(
            tuple(_align_layer(places, name, layer, number, layout) for layer in range(depth))
            for number, places in enumerate(steps)
        )


def _map_lines(seen: Observation, layout: OutputLayout) -> _OutputLines:
    """The lines that an observation holds; at its first choice a row stands for all of its request's."""
    rows, told = seen.rows, seen.recorded_lines
    row = torch.arange(len(rows)) if told is None else told.rows
    slot = rows.slot if told is None else told.slot
    at = None if told is None else told.draft_index
    number = (rows.length - rows.prompt_length)[row] + (0 if at is None else at)
    start = torch.tensor([layout.first_lines[one] for one in rows.request[row].tolist()], dtype=torch.long)
    if told is not None:
        return _OutputLines(start + slot, row, number, torch.arange(len(row)), at)
    copies = torch.tensor([layout.lines_per_request[one] for one in rows.request.tolist()], dtype=torch.long)
    copies = torch.where(number == 0, copies, 1)
    whose = row.repeat_interleave(copies)
    place = torch.arange(len(whose)) - (copies.cumsum(0) - copies)[whose]  # which of its request's lines
    return _OutputLines(
        start[whose] + torch.where(copies > 1, 0, slot)[whose] + place, whose, number[whose], None
    )


def _finished_row_scores(like: Tensor, layout: OutputLayout) -> Tensor:
    """The scores of lines that have ended [lines, V]."""
    block = like.new_full((layout.num_lines, like.shape[-1]), -torch.inf)
    if layout.pad_token_id < block.shape[1]:
        block[:, layout.pad_token_id] = 0.0
    return block


def _locate_states(seen: Observation, layout: OutputLayout, name: str) -> Iterator[tuple[int, _StateRef]]:
    """Where the states of an observation's lines are, each with the number of its new token."""
    parts = [part for part in seen.output.states if name in part]
    found = {row: (part, at) for part in parts for at, row in enumerate(part["rows"].tolist())}
    lines, index = _map_lines(seen, layout), seen.output.row_index
    fed = lines.row if index is None else index[lines.row]
    drafts = torch.zeros_like(fed) if lines.draft_index is None else lines.draft_index
    columns = (lines.line, fed, lines.token_index, drafts)
    for line, row, number, draft in zip(*(one.tolist() for one in columns), strict=True):
        if row in found:
            yield number, _StateRef(*found[row], line, draft)


def _align_layer(places: list[_StateRef], name: str, layer: int, number: int, layout: OutputLayout) -> Tensor:
    """One layer of one step [lines, ...]: queries aligned at the right, keys as far as the call's width."""
    queries = layout.prompt_width if number == 0 else 1
    keys = layout.prompt_width + number
    sample: Tensor = places[0].forward_states[name][layer]
    attention = "attentions" in name
    cross = name == "cross_attentions"
    shape: tuple[int, ...]
    if attention:
        shape = (layout.num_lines, sample.shape[1], queries, sample.shape[-1] if cross else keys)
    else:
        shape = (layout.num_lines, queries, sample.shape[-1])
    block = sample.new_zeros(shape)
    for part, at, line, draft in places:
        tensor = part[name][layer]
        # What is tried after the row's own tokens is not its past yet.
        fed, past = (
            int(part["fed_length"][at] - part["num_drafts"][at]) + draft,
            int(part["cached_length"][at]),
        )
        first = max(fed - queries, 0)  # a draft stands behind what was fed before it
        size = fed - first
        if not attention:
            block[line, queries - size :] = tensor[at, first:fed]
        elif cross:
            block[line, :, queries - size :, : tensor.shape[-1]] = tensor[at, :, first:fed]
        else:
            block[line, :, queries - size :, keys - past - fed :] = tensor[at, :, first:fed, : past + fed]
    return block
