"""Acceptance statistics of drafts per row, and the adaptive draft length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import ClassVar, Final, Self

import numpy as np
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import Speculation

# How the number of drafts changes: "constant" keeps it; "heuristic" raises it when all drafts were accepted
# and lowers it otherwise, continuing from the last request; "heuristic_transient" does so from the start of
# each request; "adaptive" chooses the most profitable number from measurements.
DRAFT_SCHEDULES: Final = ("constant", "heuristic", "heuristic_transient", "adaptive")

_DECAY: Final = 0.9  # weight of a trial relative to the next one
_NUM_SAMPLES: Final = 7  # timings kept, of which the median is used
_PRIOR_COUNTS: Final = (0.4, 1.6)  # accepted and rejected drafts a row starts with


@dataclass(frozen=True)
class AcceptanceStats:
    """The row column of drafts fed and accepted, by draft position."""

    draft_row: Array  # [R] the row's index in its group at the last draft; -1: it is new
    forwards: Array  # [R] forwards
    num_drafted: Array  # [R, W]
    num_accepted: Array  # [R, W]
    draft_length: Array  # [R] next draft length of heuristic schedules; 0: not started
    accept_weight: Array  # [R] decayed count of accepted drafts
    reject_weight: Array  # [R] decayed count of rejected drafts
    is_per_request: ClassVar[bool] = False

    @classmethod
    def new(cls) -> AcceptanceStats:
        """The statistics of one new row."""
        zero = np.zeros(1, dtype=np.int64)
        accepted, rejected = (np.array([count]) for count in _PRIOR_COUNTS)
        return cls(zero - 1, zero, zero[:, None], zero[:, None], zero, accepted, rejected)

    def take(self, parents: Tensor) -> Self:
        """The statistics of the new rows."""
        index = parents.numpy()
        return type(self)(*(array[index] for array in vars(self).values()))

    def cat(self, other: Self) -> Self:
        """These rows followed by another table's rows."""
        width = max(self.num_drafted.shape[1], other.num_drafted.shape[1])
        pairs = zip(*(vars(part._pad_to(width)).values() for part in (self, other)), strict=True)
        return type(self)(*(np.concatenate(pair) for pair in pairs))

    def after_step(self, draft_row: Array, num_drafted: Array, num_accepted: Array) -> AcceptanceStats:
        """The statistics after a step with these drafts and acceptances per row [R]."""
        width = int(num_drafted.max(initial=0))
        padded = self._pad_to(width)
        position = np.arange(padded.num_drafted.shape[1])
        # Drafts after a rejected one were not tried. Each trial decays those before it: if a step did that, a
        # long accepted draft would outweigh many rejected ones, and rows would draft long after it paid.
        rejected = (num_accepted < num_drafted).astype(np.int64)
        decay = _DECAY ** (num_accepted + rejected)
        accept_gain = _DECAY**rejected * (1 - _DECAY**num_accepted) / (1 - _DECAY)
        return replace(
            padded,
            draft_row=draft_row,
            forwards=padded.forwards + 1,
            num_drafted=padded.num_drafted + (position < num_drafted[:, None]),
            num_accepted=padded.num_accepted + (position < num_accepted[:, None]),
            accept_weight=padded.accept_weight * decay + accept_gain,
            reject_weight=padded.reject_weight * decay + rejected,
        )

    def after_untried(self, matches: Array, untried: Array) -> AcceptanceStats:
        """The statistics after checking first drafts that were not fed (`untried` [R])."""
        decay = np.where(untried, _DECAY, 1.0)
        return replace(
            self,
            accept_weight=self.accept_weight * decay + (untried & matches),
            reject_weight=self.reject_weight * decay + (untried & ~matches),
        )

    def with_draft_length(self, length: Array) -> AcceptanceStats:
        """The statistics with this next draft length per row [R]."""
        return replace(self, draft_length=length)

    @property
    def acceptance_rate(self) -> Array:
        """The estimated acceptance probability of each row's next draft [R]."""
        return np.asarray(self.accept_weight / (self.accept_weight + self.reject_weight))

    @property
    def shared_acceptance_rate(self) -> Array:
        """The same, where rows that have tried no draft take the mean of those that have [R]."""
        rates, is_tried = self.acceptance_rate, self.num_drafted[:, 0] > 0
        return np.where(is_tried, rates, rates[is_tried].mean()) if is_tried.any() else rates

    def report(self, row: int) -> Speculation:
        """The acceptance record of one row."""
        last = int(np.flatnonzero(self.num_drafted[row])[-1]) + 1 if self.num_drafted[row].any() else 0
        drafted, accepted = (
            tuple(array[row, :last].tolist()) for array in (self.num_drafted, self.num_accepted)
        )
        return Speculation(drafted, accepted, int(self.forwards[row]))

    def _pad_to(self, width: int) -> Self:
        missing = width - self.num_drafted.shape[1]
        if missing <= 0:
            return self
        num_drafted, num_accepted = (
            np.pad(array, ((0, 0), (0, missing))) for array in (self.num_drafted, self.num_accepted)
        )
        return replace(self, num_drafted=num_drafted, num_accepted=num_accepted)


class DraftLengthController:
    """Chooses the draft length with the best expected tokens per unit of time.

    Forward times are measured per number of positions. Without measurements, and where results must not
    depend on timings, each further position of a row costs `COST_PER_POSITION` of a forward, scaled by the
    square root of the number of rows; this is low, so that drafting is tried. Time is not monotonic in the
    number of positions (a matrix product with 16 rows can be faster than one with 10), so each count is
    timed separately.
    """

    COST_PER_POSITION: Final = 0.1
    DRAFT_MODEL_COST: Final = 0.15  # cost of one draft-model step in target forwards
    MIN_SPEEDUP: Final = 1.1  # required advantage over no drafts, as the estimate is noisy
    MAX_PROBE_INTERVAL: Final = 64  # maximum steps without drafts before the draft model is probed
    MANY_ROWS: Final = 8  # from so many rows on, probes become rare sooner, and a part of the rows makes them
    PROBING_SHARE: Final = 4  # one in so many rows makes a probe
    PROMISING_RATE: Final = 0.3  # a mean rate from which all rows make a probe, whose forward is timed
    REMEASURE_INTERVAL: Final = 48  # steps after which a step without drafts is timed again

    def __init__(self) -> None:
        self._forward_seconds: dict[int, deque[float]] = {}  # positions fed -> recent timings
        # Recent seconds per draft-model step.
        self._draft_seconds: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._steps_since_baseline = 0  # steps since a step without drafts was timed
        self._steps_since_draft = 0  # steps since the draft model last ran
        self._probe_interval = 1

    def record_forward(self, positions: int, seconds: float, width: int = 0) -> None:
        """Record the time of a forward with this many positions and drafts of this width."""
        self._forward_seconds.setdefault(positions, deque(maxlen=_NUM_SAMPLES)).append(seconds)
        self._steps_since_baseline = self._steps_since_baseline + 1 if width else 0

    def record_draft(self, count: int, seconds: float) -> None:
        """Record the time of drafting `count` tokens."""
        self._draft_seconds.append(seconds / count)

    def choose_length(
        self, acceptance_rates: Array, max_drafts: Array, is_model_free: bool, use_timings: bool
    ) -> int | Array:
        """The draft length for rows with these acceptance rates and limits [R]; [R] if it differs by row."""
        longest, rows = int(max_drafts.max(initial=0)), len(acceptance_rates)
        if not longest:
            return 0
        baseline = self._baseline_seconds(rows) if use_timings else None
        if use_timings and (baseline is None or self._steps_since_baseline >= self.REMEASURE_INTERVAL):
            return 0  # time a step without drafts
        widths = np.arange(longest + 1)
        rates = np.clip(acceptance_rates, 0.0, 0.999)[:, None]
        num_drafts = np.minimum(widths, max_drafts[:, None])
        expected_tokens = ((1 - rates ** (num_drafts + 1)) / (1 - rates)).sum(0)  # per step
        cost = np.array([self._relative_cost(rows, int(width), baseline) for width in widths])
        if not is_model_free:
            cost += widths * (
                median(self._draft_seconds) / baseline
                if baseline and self._draft_seconds
                else self.DRAFT_MODEL_COST
            )
        throughput = expected_tokens / cost
        best = int(throughput.argmax())
        best = best if throughput[best] > self.MIN_SPEEDUP * throughput[0] else 0
        return best if is_model_free else self._probe_if_idle(best, acceptance_rates, max_drafts)

    def _probe_if_idle(self, best: int, acceptance_rates: Array, max_drafts: Array) -> int | Array:
        """The same length, or occasionally 1 in place of 0, to notice when the acceptance rate rises.

        The first of many rows make the probe, so that the draft model reads the others' tokens only if it is
        worth it.
        """
        if best:
            self._steps_since_draft, self._probe_interval = 0, 1
            return best
        self._steps_since_draft += 1
        if self._steps_since_draft < self._probe_interval:
            return 0
        # A probe of many rows costs more and tells more, so it is repeated less often.
        rows = len(acceptance_rates)
        growth = 4 if rows >= self.MANY_ROWS else 2
        self._steps_since_draft = 0
        self._probe_interval = min(growth * self._probe_interval, self.MAX_PROBE_INTERVAL)
        if rows < self.MANY_ROWS or acceptance_rates.mean() >= self.PROMISING_RATE:
            return 1
        lengths = np.zeros_like(max_drafts)
        lengths[np.flatnonzero(max_drafts)[: rows // self.PROBING_SHARE]] = 1
        return lengths

    def _baseline_seconds(self, rows: int) -> float | None:
        """The time of a step without drafts for about this many rows; None if not measured."""
        nearest = min(self._forward_seconds, key=lambda count: abs(count - rows), default=None)
        if nearest is None or abs(nearest - rows) > rows // 4:
            return None
        return median(self._forward_seconds[nearest])

    def _relative_cost(self, rows: int, width: int, baseline: float | None) -> float:
        """The cost of a step with this draft length, relative to one without drafts."""
        positions = rows * (width + 1)
        estimate = 1 + self.COST_PER_POSITION * width * sqrt(rows)
        if baseline is None or not width or positions not in self._forward_seconds:
            return estimate
        measured = max(median(self._forward_seconds[positions]) / baseline, 1.0)
        # The first forward of a shape may include warm-up.
        return min(measured, estimate) if len(self._forward_seconds[positions]) == 1 else measured
