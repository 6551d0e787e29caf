"""The settings, candidates, request groups and recorded lines of one beam search step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import Array
from descant.core.records import RecordedLines
from descant.core.rows import Rows, index_rows
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses

__all__ = [
    "LIMIT_REASONS",
    "BeamCandidates",
    "BeamGroup",
    "BeamSettings",
    "TableLayout",
    "append_beam_indices",
    "concat_recorded_lines",
    "recorded_lines",
]

LIMIT_REASONS = ("length", "time")  # these finish a row whatever its token


class BeamSettings(NamedTuple):
    """The settings that requests of one beam search share."""

    num_beams: int  # beams per request
    num_groups: int = 1  # groups the beams are divided into (diverse beam search)
    candidates_per_beam: int = 2  # candidates considered per beam
    do_sample: bool = False  # sample candidates instead of ranking them

    @property
    def group_size(self) -> int:
        """Beams per group."""
        return self.num_beams // self.num_groups


@dataclass
class BeamCandidates:
    """The candidates of one step on the host, best (or first sampled) first [B, K]."""

    sum_logprobs: Array  # summed log-probabilities
    parent_rows: Tensor  # the row of each candidate
    parent_slots: Tensor  # the slot of that row
    tokens: Tensor
    finished_mask: Array  # bool
    finish_reasons: Sequence[tuple[str, Array]]

    def finish_reason(self, index: int, rank: int) -> str:
        """Why candidate `rank` of request `index` finishes."""
        flat = index * self.sum_logprobs.shape[1] + rank
        return next(name for name, mask in self.finish_reasons if mask[flat])

    def reason_mask(self, *names: str) -> Array:
        """Which candidates finish for one of these reasons [B, K]."""
        matches = np.zeros(self.sum_logprobs.size, dtype=bool)
        for name, mask in self.finish_reasons:
            if name in names:
                matches |= mask
        return matches.reshape(self.sum_logprobs.shape)


@dataclass
class BeamGroup:
    """Requests with equally many rows in one beam group."""

    group_index: int
    rows: Tensor  # [B, N] rows of each in the order of their slots
    requests: Array  # [B]
    table: Rows
    pools: FinishedHypotheses
    num_groups: int = 1

    @cached_property
    def pool_indices(self) -> Array:
        """The index of each request's pool [B]."""
        return self.pools.indices_of(self.requests * self.num_groups + self.group_index)

    @cached_property
    def scoring(self) -> BeamScoring:
        """The scoring of each request."""
        return _beam_scoring(self.table, self.rows[:, 0].numpy())


class RequestBatch(NamedTuple):
    """Requests of a table with equally many rows."""

    num_rows: int  # of each
    place: Array | None  # [B * N] places in the order of the rows; None: all
    requests: Array  # [B] ascending


class TableLayout(NamedTuple):
    """The requests of a table version; the order of a request's own rows is that of their slots."""

    version: object
    key: Array  # [R] of each row, to which its slot is added
    batches: Sequence[RequestBatch]  # requests at their first token have one row, all others `num_beams`

    @classmethod
    def from_rows(cls, rows: Rows, num_beams: int) -> Self:
        """The layout of a table."""
        requests, rank, counts = np.unique(rows.request.numpy(), return_inverse=True, return_counts=True)
        batches = []
        for count in sorted(set(counts.tolist())):
            is_own = counts == count
            place = None if is_own.all() else np.flatnonzero(np.repeat(is_own, counts))
            batches.append(RequestBatch(count, place, requests[is_own]))
        return cls(rows.version, rank * num_beams, batches)

    def row_order(self, rows: Rows) -> Array:
        """The rows by request and slot [R]."""
        return np.argsort(self.key + rows.slot.numpy())


def _beam_scoring(rows: Rows, first_rows: Array) -> BeamScoring:
    """The scoring of the requests whose first rows are `first_rows` [B]."""
    params = row_params(rows)
    prompt_length = rows.prompt_length.numpy()[first_rows]
    return BeamScoring(
        rows.length.numpy()[first_rows] + 1 - prompt_length,
        params["max_length"].numpy()[first_rows] - prompt_length,
        params["early_stopping"].numpy()[first_rows],
        params["length_penalty"].numpy()[first_rows],
    )


def recorded_lines(
    rows: Rows, group_rows: Array, is_unexpanded: Array, first_slot: int, group_size: int, scores: Tensor
) -> RecordedLines:
    """A group's recorded lines: at the first token one row counts for all of the group's slots."""
    copies = np.where(is_unexpanded[group_rows], group_size, 1)
    row_position = np.arange(len(group_rows)).repeat(copies)
    offset = np.arange(len(row_position)) - (np.cumsum(copies) - copies)[row_position]
    slot = np.where(
        is_unexpanded[group_rows][row_position],
        first_slot + offset,
        rows.slot.numpy()[group_rows][row_position],
    )
    index = torch.from_numpy(row_position)
    return RecordedLines(
        torch.from_numpy(group_rows)[index], torch.from_numpy(slot), index_rows(scores, index)
    )


def concat_recorded_lines(parts: Sequence[RecordedLines]) -> RecordedLines:
    """The recorded lines of several groups as one."""
    scores = [part.scores for part in parts if part.scores is not None]
    return RecordedLines(
        torch.cat([part.rows for part in parts]), torch.cat([part.slot for part in parts]), torch.cat(scores)
    )


def append_beam_indices(rows: Rows, parents: Tensor, slots: Tensor) -> Tensor:
    """The parents' beam indices with the chosen slots appended [R', C]."""
    beam_indices = torch.from_numpy(rows.column("beam_indices").numpy()[parents.numpy()])
    position = (rows.length.numpy() - rows.prompt_length.numpy())[parents.numpy()]
    width = int(position.max(initial=-1)) + 1
    if width > beam_indices.shape[1]:
        beam_indices = torch.nn.functional.pad(beam_indices, (0, width), value=-1)
    beam_indices.numpy()[np.arange(len(position)), position] = slots.numpy()
    return beam_indices
