"""The settings, candidates and request groups of one beam search step."""

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
from descant.core.rows import Rows
from descant.decoding.strategies.beams.finished_pool import BeamScoring, FinishedHypotheses, top_unfinished

__all__ = [
    "LIMIT_REASONS",
    "BeamCandidates",
    "BeamGroup",
    "BeamSettings",
    "TableLayout",
    "append_beam_indices",
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


class BeamCandidates(NamedTuple):
    """The candidates of one step on the host, best (or first sampled) first [B, K]."""

    sum_logprobs: Array  # summed log-probabilities
    parent_rows: Array  # the row of each candidate
    parent_slots: Array  # the slot of that row
    tokens: Array
    finish_reasons: Sequence[tuple[str, Array]]  # the candidates that each reason finishes, bool

    def finish_reason(self, index: int, rank: int) -> str:
        """Why candidate `rank` of request `index` finishes."""
        return next(name for name, mask in self.finish_reasons if mask[index, rank])

    def reason_mask(self, *names: str) -> Array:
        """Which candidates finish for one of these reasons, or for any [B, K]."""
        matches = np.zeros(self.sum_logprobs.shape, dtype=bool)
        for name, mask in self.finish_reasons:  # one name may be there twice
            if not names or name in names:
                matches |= mask
        return matches

    def top(self, finished: Array, width: int) -> BeamCandidates:
        """The `width` best that do not finish [B, W]; the sum of others, where too few are left, is -inf."""
        ranks = top_unfinished(self.sum_logprobs, finished, width)
        lines = np.arange(len(ranks))[:, None]
        unfinished_sums = np.where(finished, -np.inf, self.sum_logprobs)
        return BeamCandidates(
            unfinished_sums[lines, ranks],
            self.parent_rows[lines, ranks],
            self.parent_slots[lines, ranks],
            self.tokens[lines, ranks],
            [(name, mask[lines, ranks]) for name, mask in self.finish_reasons],
        )


@dataclass
class BeamGroup:
    """Requests with equally many rows in one beam group."""

    index: int
    rows: Array  # [B, N] rows of each in the order of their slots
    requests: Array  # [B]
    table: Rows
    pools: FinishedHypotheses
    num_groups: int

    @cached_property
    def pool_indices(self) -> Array:
        """The index of each request's pool [B]."""
        return self.pools.indices_of(self.requests * self.num_groups + self.index)

    @cached_property
    def scoring(self) -> BeamScoring:
        """The scoring of each request."""
        params, first_rows = row_params(self.table), self.rows[:, 0]
        prompt_length = self.table.prompt_length.numpy()[first_rows]
        return BeamScoring(
            self.table.length.numpy()[first_rows] + 1 - prompt_length,
            params["max_length"].numpy()[first_rows] - prompt_length,
            params["early_stopping"].numpy()[first_rows],
            params["length_penalty"].numpy()[first_rows],
        )


class TableLayout(NamedTuple):
    """The requests of a table version; the order of a request's own rows is that of their slots."""

    version: object
    key: Array  # [R] of each row, to which its slot is added
    batches: Sequence[tuple[Array | None, Array]]  # places in the order of rows (None: all), and the requests

    @classmethod
    def from_rows(cls, rows: Rows, num_beams: int) -> Self:
        """The layout of a table, batched by the requests' number of rows: one at the first token."""
        requests, rank, counts = np.unique(rows.request.numpy(), return_inverse=True, return_counts=True)
        batches: list[tuple[Array | None, Array]] = []
        for count in sorted(set(counts.tolist())):
            is_own = counts == count
            place = None if is_own.all() else np.flatnonzero(np.repeat(is_own, counts))
            batches.append((place, requests[is_own]))
        return cls(rows.version, rank * num_beams, batches)

    def row_order(self, rows: Rows) -> Array:
        """The rows by request and slot [R]."""
        return np.argsort(self.key + rows.slot.numpy())


def append_beam_indices(rows: Rows, parents: Array, slots: Array) -> Tensor:
    """The parents' beam indices with the chosen slots appended [R', C], equally wide for all of a table."""
    beam_indices = torch.from_numpy(rows.column("beam_indices").numpy()[parents])
    position = rows.length.numpy() - rows.prompt_length.numpy()
    width = int(position.max()) + 1
    if width > beam_indices.shape[1]:
        beam_indices = torch.nn.functional.pad(beam_indices, (0, width), value=-1)
    beam_indices.numpy()[np.arange(len(parents)), position[parents]] = slots
    return beam_indices
