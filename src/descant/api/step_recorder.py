"""Recorder of the per-step outputs of generate(): scores, logits, attentions, hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from descant.core.records import Observation
from descant.core.rows import index_rows


@dataclass(frozen=True)
class OutputLayout:
    """Maps rows of the table to rows of the output: request `r`, slot `s` is row `first_rows[r] + s`."""

    first_rows: Mapping[int, int]  # by request
    rows_per_request: Mapping[int, int]
    pad_token_id: int  # the token that finished rows are scored with
    prompt_width: int  # of the padded prompts

    @property
    def num_rows(self) -> int:
        """The number of rows of the output."""
        return sum(self.rows_per_request.values())

    def output_row(self, request: int, slot: int) -> int:
        """The row of the output for a row of the table; the first of its request for a candidate row."""
        return self.first_rows[request] + (slot if slot < self.rows_per_request[request] else 0)

    def has_rows(self, requests: Tensor, slots: Tensor) -> bool:
        """Whether rows of the table [R] (host) all have a row of their own in the output."""
        pairs = zip(requests.tolist(), slots.tolist(), strict=True)
        return all(slot < self.rows_per_request[request] for request, slot in pairs)


class _OutputRows(NamedTuple):
    """The rows of the output that an observation holds."""

    output_row: Tensor  # [N]
    row: Tensor  # [N] the row of the strategy group
    token_index: Tensor  # [N] the index of the new token
    score_row: Tensor | None  # [N] the row of `recorded_lines.scores`; None: the row's own scores
    draft_index: Tensor | None = None  # [N] how many of the row's drafts come before; None: none


class _StateRef(NamedTuple):
    """The states of one row in one forward."""

    forward_states: Mapping[str, Any]
    row_index: int
    output_row: int
    draft_index: int  # how many drafts come before


@dataclass
class StepRecorder:
    """Stores the requested tensors of every step, and builds the documented output at the end.

    A finished row has score 0 for the pad token and -inf for all others.
    """

    output_names: frozenset[str]  # "scores", "logits", "hidden_states", "attentions"
    observations: list[Observation] = field(default_factory=list)
    current: Observation | None = None  # of a group that is about to choose

    def preview(self, observation: Observation) -> None:
        """Take the scores of a step before its tokens are chosen, for stopping criteria."""
        self.current = observation

    def __call__(self, observation: Observation) -> None:
        """Store the observation of one strategy group in one step."""
        self.observations.append(observation)
        self.current = None

    def step_tensors(self, name: str, layout: OutputLayout) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of every new token [rows, V]."""
        if name not in self.output_names:
            return None
        blocks: list[Tensor] = []
        last_index = torch.full((layout.num_rows,), -1)
        for observation in self.observations:
            rows = write_step(blocks, observation, layout, name)
            last_index[rows.output_row] = rows.token_index
        # A row that backtracked has recorded later tokens than it now has.
        for number, block in enumerate(blocks):
            stale = (last_index < number).nonzero().squeeze(1).to(block.device)
            block[stale] = _finished_row_scores(block, layout)[stale]
        return tuple(blocks[: int(last_index.max()) + 1])

    def states(self, name: str, layout: OutputLayout) -> tuple[tuple[Tensor, ...], ...] | None:
        """Hidden states or attentions of every new token, a tuple of layers each, aligned as the prompts."""
        steps: list[list[_StateRef]] = []
        for observation in self.observations:
            for number, ref in _locate_states(observation, layout, name):
                while len(steps) <= number:
                    steps.append([])
                steps[number].append(ref)
                for later in steps[number + 1 :]:  # removed by backtracking
                    later[:] = [other for other in later if other.output_row != ref.output_row]
        while steps and not steps[-1]:
            steps.pop()
        if not steps:
            return None
        num_layers = len(steps[0][0].forward_states[name])
        return tuple(
            tuple(_align_layer(refs, name, layer, number, layout) for layer in range(num_layers))
            for number, refs in enumerate(steps)
        )


def write_step(
    blocks: list[Tensor], observation: Observation, layout: OutputLayout, name: str
) -> _OutputRows:
    """Write `scores` or `logits` of an observation into the block [rows, V] of each new token."""
    rows = _map_rows(observation, layout)
    source, index = _select_source(observation, rows, name)
    for number in sorted(set(rows.token_index.tolist())):
        while len(blocks) <= number:
            blocks.append(_finished_row_scores(source, layout))
        members = (rows.token_index == number).nonzero().squeeze(1)
        target = rows.output_row[members].to(source.device)
        blocks[number][target] = index_rows(source, index[members])
    return rows


def _select_source(observation: Observation, rows: _OutputRows, name: str) -> tuple[Tensor, Tensor]:
    """The tensor [N, V] that holds `name` of an observation, and the row of it for each output row."""
    recorded = observation.recorded_lines
    scores = recorded.scores if recorded is not None and name == "scores" else None
    if scores is not None and rows.score_row is not None:
        return scores, rows.score_row
    tensor: Tensor = getattr(observation, name)  # [R, drafts + 1, V]
    if rows.draft_index is None or tensor.shape[1] == 1:
        return tensor[:, 0], rows.row
    return tensor.flatten(0, 1), rows.row * tensor.shape[1] + rows.draft_index


def _map_rows(observation: Observation, layout: OutputLayout) -> _OutputRows:
    """The output rows of an observation; at the first token a row stands for all rows of its request."""
    rows, recorded = observation.rows, observation.recorded_lines
    row = torch.arange(len(rows)) if recorded is None else recorded.rows
    slot = rows.slot if recorded is None else recorded.slot
    draft_index = None if recorded is None else recorded.draft_index
    token_index = (rows.length - rows.prompt_length)[row] + (0 if draft_index is None else draft_index)
    first_row = torch.tensor(
        [layout.first_rows[request] for request in rows.request[row].tolist()], dtype=torch.long
    )
    if recorded is not None:
        return _OutputRows(first_row + slot, row, token_index, torch.arange(len(row)), draft_index)
    counts = torch.tensor(
        [layout.rows_per_request[request] for request in rows.request.tolist()], dtype=torch.long
    )
    counts = torch.where(token_index == 0, counts, 1)
    repeated = row.repeat_interleave(counts)
    offset = torch.arange(len(repeated)) - (counts.cumsum(0) - counts)[repeated]  # within the request
    output_row = first_row[repeated] + torch.where(counts > 1, 0, slot)[repeated] + offset
    return _OutputRows(output_row, repeated, token_index[repeated], None)


def _finished_row_scores(like: Tensor, layout: OutputLayout) -> Tensor:
    """The scores of finished rows [rows, V]."""
    block = like.new_full((layout.num_rows, like.shape[-1]), -torch.inf)
    if layout.pad_token_id < block.shape[1]:
        block[:, layout.pad_token_id] = 0.0
    return block


def _locate_states(
    observation: Observation, layout: OutputLayout, name: str
) -> Iterator[tuple[int, _StateRef]]:
    """References to the states of an observation's rows, each with the index of its new token."""
    parts = [part for part in observation.output.states if name in part]
    located = {row: (part, index) for part in parts for index, row in enumerate(part["rows"].tolist())}
    rows, row_index = _map_rows(observation, layout), observation.output.row_index
    fed_row = rows.row if row_index is None else row_index[rows.row]
    drafts = torch.zeros_like(fed_row) if rows.draft_index is None else rows.draft_index
    columns = (rows.output_row, fed_row, rows.token_index, drafts)
    for output_row, row, number, draft in zip(*(column.tolist() for column in columns), strict=True):
        if row in located:
            yield number, _StateRef(*located[row], output_row, draft)


def _align_layer(refs: list[_StateRef], name: str, layer: int, number: int, layout: OutputLayout) -> Tensor:
    """One layer of one step [rows, ...]: queries right-aligned, keys as wide as the padded sequences."""
    queries = layout.prompt_width if number == 0 else 1
    keys = layout.prompt_width + number
    sample: Tensor = refs[0].forward_states[name][layer]
    is_attention = "attentions" in name
    is_cross = name == "cross_attentions"
    shape: tuple[int, ...]
    if is_attention:
        shape = (layout.num_rows, sample.shape[1], queries, sample.shape[-1] if is_cross else keys)
    else:
        shape = (layout.num_rows, queries, sample.shape[-1])
    block = sample.new_zeros(shape)
    for part, index, output_row, draft in refs:
        tensor = part[name][layer]
        # Drafts behind the row's own tokens are not part of its sequence yet.
        fed = int(part["fed_length"][index] - part["num_drafts"][index]) + draft
        cached = int(part["cached_length"][index])
        first = max(fed - queries, 0)  # a draft is behind the tokens that were fed before it
        size = fed - first
        if not is_attention:
            block[output_row, queries - size :] = tensor[index, first:fed]
        elif is_cross:
            block[output_row, :, queries - size :, : tensor.shape[-1]] = tensor[index, :, first:fed]
        else:
            visible = tensor[index, :, first:fed, : cached + fed]
            block[output_row, :, queries - size :, keys - cached - fed :] = visible
    return block


class CriterionScores:
    """The scores of a call so far, [rows, V] for each new token, as its output will have them.

    Every step is written once. Where a method records its scores only after it has chosen (drafts and
    candidates), those of the current step come with the next one.
    """

    def __init__(self, recorder: StepRecorder, layout: Callable[[], OutputLayout]) -> None:
        self._recorder = recorder
        self._layout = layout  # known once the prompts are admitted
        self._blocks: list[Tensor] = []
        self._num_written = 0
        self._current: tuple[Observation | None, tuple[Tensor, ...]] = (None, ())

    def of_rows(self, rows: tuple[Tensor, Tensor] | None) -> Sequence[Tensor]:
        """The scores so far of the rows of these requests and slots [M] (host); None: of all rows."""
        steps = self._so_far()
        if rows is None:
            return steps
        layout = self._layout()
        index = [layout.output_row(*pair) for pair in zip(rows[0].tolist(), rows[1].tolist(), strict=True)]
        return steps if index == list(range(layout.num_rows)) else SelectedScores(steps, torch.tensor(index))

    def _so_far(self) -> tuple[Tensor, ...]:
        """The scores of all steps, the current one included."""
        current = self._recorder.current
        if current is not None and self._current[0] is current:
            return self._current[1]
        layout = self._layout()
        new = self._recorder.observations[self._num_written :]
        for observation in new:
            write_step(self._blocks, observation, layout, "scores")
        self._num_written += len(new)
        if current is None or not layout.has_rows(current.rows.request, current.rows.slot):
            return tuple(self._blocks)
        blocks = list(self._blocks)
        first = int((current.rows.length - current.rows.prompt_length).min())
        blocks[first:] = [block.clone() for block in blocks[first:]]
        write_step(blocks, current, layout, "scores")
        self._current = (current, tuple(blocks))
        return self._current[1]


class SelectedScores(Sequence[Tensor]):
    """The scores of some rows in every step; each step is selected when it is read."""

    def __init__(self, steps: Sequence[Tensor], rows: Tensor) -> None:
        self._steps, self._rows = steps, rows

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> SelectedScores: ...

    def __getitem__(self, index: int | slice) -> Tensor | SelectedScores:
        if isinstance(index, slice):
            return SelectedScores(self._steps[index], self._rows)
        return index_rows(self._steps[index], self._rows)


class ScoredCriterion:
    """A user's criterion that is called with the scores of its call, one line for each row it is shown."""

    def __init__(self, criterion: Callable[..., Any], scores: CriterionScores) -> None:
        self.criterion, self.scores = criterion, scores

    def __call__(self, input_ids: Tensor, _: Any) -> Any:
        """The criterion's verdict on all rows of the call."""
        return self.call_on_rows(input_ids, None)

    def call_on_rows(self, input_ids: Tensor, rows: tuple[Tensor, Tensor] | None) -> Any:
        """The criterion's verdict on the rows of these requests and slots [M] (host); None: on all."""
        return self.criterion(input_ids, self.scores.of_rows(rows))
