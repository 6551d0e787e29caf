"""The settings, candidates and request groups of one beam search step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from descant.core.interfaces import Array
from descant.decoding.strategies.beams.finished_pool import BeamScoring

__all__ = ["LIMIT_REASONS", "BeamCandidates", "BeamGroup", "BeamSettings"]

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


class BeamGroup(NamedTuple):
    """Requests with equally many rows in one beam group."""

    group_index: int
    rows: Tensor  # [B, N]
    requests: Array  # [B]
    pool_indices: Array  # [B] index of each request's pool
    scoring: BeamScoring
