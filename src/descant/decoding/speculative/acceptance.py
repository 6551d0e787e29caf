"""What has become of guesses, row by row, and how many to make next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import ClassVar, Final, Self

import numpy as np
from torch import Tensor

from descant.core.interfaces import Array
from descant.core.records import Speculation

__all__ = ["DRAFT_SCHEDULES", "AcceptanceStats", "DraftLengthController"]

# How many tokens to guess: always as many, or more after a run that was right and fewer after another
# ("heuristic" goes on where the last request stopped, "heuristic_transient" begins anew), or as many as
# pay by what was measured.
DRAFT_SCHEDULES: Final = ("constant", "heuristic", "heuristic_transient", "adaptive")

_DECAY: Final = 0.9  # what a trial counts for after the next one
_NUM_SAMPLES: Final = 7  # of which the one in the middle counts
_PRIOR_COUNTS: Final = (0.4, 1.6)  # right and wrong guesses that a row begins with


@dataclass(frozen=True)
class AcceptanceStats:
    """The column: how many guesses each row has tried and how many were right, by place in the run."""

    draft_row: Array  # [R] where the row stood in its lane at the last draft; -1: it was not there
    forwards: Array  # [R] forwards
    num_drafted: Array  # [R, W]
    num_accepted: Array  # [R, W]
    draft_length: Array  # [R] how many to guess next, of rows whose schedule says so; 0: not begun
    accept_weight: Array  # [R] guesses that were right, the older the less they count
    reject_weight: Array  # [R] and that were wrong
    is_per_request: ClassVar[bool] = False

    @classmethod
    def new(cls) -> AcceptanceStats:
        """Of one row that begins."""
        none = np.zeros(1, dtype=np.int64)
        won, lost = (np.array([count]) for count in _PRIOR_COUNTS)
        return cls(none - 1, none, none[:, None], none[:, None], none, won, lost)

    def take(self, parents: Tensor) -> Self:
        """The tallies of the new rows."""
        index = parents.numpy()
        return type(self)(*(part[index] for part in self._arrays()))

    def cat(self, other: Self) -> Self:
        """These rows' tallies with another table's below."""
        wide = max(self.num_drafted.shape[1], other.num_drafted.shape[1])
        both = zip(self._pad_to(wide)._arrays(), other._pad_to(wide)._arrays(), strict=True)
        return type(self)(*(np.concatenate(pair) for pair in both))

    def after_step(self, place: Array, tried: Array, right: Array) -> AcceptanceStats:
        """The same rows after a step in which each tried and got right so many [R]."""
        wide = int(tried.max(initial=0))
        mine = self._pad_to(wide)
        at = np.arange(mine.num_drafted.shape[1])
        won, lost = mine.accept_weight, mine.reject_weight
        here = tried > 0
        # A row that does not guess learns nothing and forgets nothing.
        fade = np.where(here, _DECAY, 1.0)
        return replace(
            mine,
            draft_row=place,
            forwards=mine.forwards + 1,
            num_drafted=mine.num_drafted + (at < tried[:, None]),
            num_accepted=mine.num_accepted + (at < right[:, None]),
            accept_weight=won * fade + right,
            reject_weight=lost * fade + (here & (right < tried)),
        )

    def after_untried(self, right: Array, asked: Array) -> AcceptanceStats:
        """The same rows, of which some [R] would have had their first guess right [R]."""
        fade = np.where(asked, _DECAY, 1.0)
        return replace(
            self,
            accept_weight=self.accept_weight * fade + (asked & right),
            reject_weight=self.reject_weight * fade + (asked & ~right),
        )

    def with_draft_length(self, size: Array) -> AcceptanceStats:
        """The same rows, to guess so many [R] next."""
        return replace(self, draft_length=size)

    @property
    def acceptance_rate(self) -> Array:
        """How likely each row's next guess is right [R]."""
        return np.asarray(self.accept_weight / (self.accept_weight + self.reject_weight))

    def report(self, row: int) -> Speculation:
        """What came of a row's guesses."""
        last = int(np.flatnonzero(self.num_drafted[row])[-1]) + 1 if self.num_drafted[row].any() else 0
        tried, right = (tuple(part[row, :last].tolist()) for part in (self.num_drafted, self.num_accepted))
        return Speculation(tried, right, int(self.forwards[row]))

    def _arrays(self) -> Sequence[Array]:
        return (
            self.draft_row,
            self.forwards,
            self.num_drafted,
            self.num_accepted,
            self.draft_length,
            self.accept_weight,
            self.reject_weight,
        )

    def _pad_to(self, wide: int) -> Self:
        lacks = wide - self.num_drafted.shape[1]
        if lacks <= 0:
            return self
        tried, right = (np.pad(part, ((0, 0), (0, lacks))) for part in (self.num_drafted, self.num_accepted))
        return replace(self, num_drafted=tried, num_accepted=right)


class DraftLengthController:
    """How wide a step pays: what forwards of so many positions take, measured as they are made.

    Before it is measured, and where a result must not depend on a clock, each further position of one row
    costs `SLOPE` of a forward, and of several rows as the root of their number, which is little: whatever
    might pay is tried. Time is no even function of the positions (a product of sixteen lines can take less
    than one of ten), so each count has its own.
    """

    COST_PER_POSITION: Final = 0.1
    DRAFT_MODEL_COST: Final = 0.15  # what a network takes for one more guess of every row, in forwards
    MIN_SPEEDUP: Final = 1.1  # by how much guessing must look better: what looks best is partly luck
    MAX_PROBE_INTERVAL: Final = 64  # steps without a guess, before a network is asked for one again
    REMEASURE_INTERVAL: Final = 48  # steps after which it is measured again what one without guesses takes

    def __init__(self) -> None:
        self._forward_seconds: dict[int, deque[float]] = {}  # positions fed -> seconds, the last few times
        # Seconds that a network takes for one guess of every row, the last few times.
        self._draft_seconds: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._steps_since_baseline = 0  # steps since one without guesses was measured
        self._steps_since_draft = 0  # steps since a network last guessed
        self._probe_interval = 1

    def record_forward(self, positions: int, seconds: float, width: int = 0) -> None:
        """Take in that a forward of so many positions took so long, with drafts of that width."""
        self._forward_seconds.setdefault(positions, deque(maxlen=_NUM_SAMPLES)).append(seconds)
        self._steps_since_baseline = self._steps_since_baseline + 1 if width else 0

    def record_draft(self, count: int, seconds: float) -> None:
        """Take in that guessing `count` tokens took so long."""
        self._draft_seconds.append(seconds / count)

    def choose_length(self, rate: Array, most: Array, is_model_free: bool, use_timings: bool) -> int:
        """How many tokens to try, where each row could try `most` and is right at that rate [R]."""
        longest, rows = int(most.max(initial=0)), len(rate)
        if not longest:
            return 0
        base = self._baseline_seconds(rows) if use_timings else None
        if use_timings and (base is None or self._steps_since_baseline >= self.REMEASURE_INTERVAL):
            return 0  # what a step takes without guesses is to be known
        widths = np.arange(longest + 1)
        chance = np.clip(rate, 0.0, 0.999)[:, None]
        reach = np.minimum(widths, most[:, None])
        gain = ((1 - chance ** (reach + 1)) / (1 - chance)).sum(0)  # tokens a step
        cost = np.array([self._relative_cost(rows, int(one), base) for one in widths])
        if not is_model_free:
            cost += widths * (
                median(self._draft_seconds) / base if base and self._draft_seconds else self.DRAFT_MODEL_COST
            )
        worth = gain / cost
        best = int(worth.argmax())
        best = best if worth[best] > self.MIN_SPEEDUP * worth[0] else 0
        return best if is_model_free else self._probe_if_idle(best)

    def _probe_if_idle(self, best: int) -> int:
        """The same, but now and then one guess where none pays: what is never asked cannot improve."""
        if best:
            self._steps_since_draft, self._probe_interval = 0, 1
            return best
        self._steps_since_draft += 1
        if self._steps_since_draft < self._probe_interval:
            return 0
        self._steps_since_draft, self._probe_interval = (
            0,
            min(2 * self._probe_interval, self.MAX_PROBE_INTERVAL),
        )
        return 1

    def _baseline_seconds(self, rows: int) -> float | None:
        """What a step of so many rows takes without guesses, or one of nearly as many."""
        nearest = min(self._forward_seconds, key=lambda count: abs(count - rows), default=None)
        if nearest is None or abs(nearest - rows) > rows // 4:
            return None
        return median(self._forward_seconds[nearest])

    def _relative_cost(self, rows: int, width: int, base: float | None) -> float:
        """What a step of that width costs, in steps without guesses."""
        wide = rows * (width + 1)
        usual = 1 + self.COST_PER_POSITION * width * sqrt(rows)
        if base is None or not width or wide not in self._forward_seconds:
            return usual
        known = max(median(self._forward_seconds[wide]) / base, 1.0)
        # The first time much may have had to be prepared.
        return min(known, usual) if len(self._forward_seconds[wide]) == 1 else known
