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

__all__ = ["SCHEDULES", "Pace", "Tally"]

# How many tokens to guess: always as many, or more after a run that was right and fewer after another
# ("heuristic" goes on where the last request stopped, "heuristic_transient" begins anew), or as many as
# pay by what was measured.
SCHEDULES: Final = ("constant", "heuristic", "heuristic_transient", "adaptive")

_MEMORY: Final = 0.9  # what a trial counts for after the next one
_SAMPLES: Final = 7  # of which the one in the middle counts
_PRIOR: Final = (0.4, 1.6)  # right and wrong guesses that a row begins with


@dataclass(frozen=True)
class Tally:
    """The column: how many guesses each row has tried and how many were right, by place in the run."""

    place: Array  # [R] where the row stood in its lane at the last draft; -1: it was not there
    steps: Array  # [R] forwards
    tried: Array  # [R, W]
    right: Array  # [R, W]
    size: Array  # [R] how many to guess next, of rows whose schedule says so; 0: not begun
    won: Array  # [R] guesses that were right, the older the less they count
    lost: Array  # [R] and that were wrong
    constant: ClassVar[bool] = False

    @classmethod
    def new(cls) -> Tally:
        """Of one row that begins."""
        none = np.zeros(1, dtype=np.int64)
        won, lost = (np.array([count]) for count in _PRIOR)
        return cls(none - 1, none, none[:, None], none[:, None], none, won, lost)

    def take(self, parents: Tensor) -> Self:
        """The tallies of the new rows."""
        index = parents.numpy()
        return type(self)(*(part[index] for part in self._parts()))

    def cat(self, other: Self) -> Self:
        """These rows' tallies with another table's below."""
        wide = max(self.tried.shape[1], other.tried.shape[1])
        both = zip(self._widened(wide)._parts(), other._widened(wide)._parts(), strict=True)
        return type(self)(*(np.concatenate(pair) for pair in both))

    def counted(self, place: Array, tried: Array, right: Array) -> Tally:
        """The same rows after a step in which each tried and got right so many [R]."""
        wide = int(tried.max(initial=0))
        mine = self._widened(wide)
        at = np.arange(mine.tried.shape[1])
        won, lost = mine.won, mine.lost
        here = tried > 0
        # A row that does not guess learns nothing and forgets nothing.
        fade = np.where(here, _MEMORY, 1.0)
        return replace(
            mine,
            place=place,
            steps=mine.steps + 1,
            tried=mine.tried + (at < tried[:, None]),
            right=mine.right + (at < right[:, None]),
            won=won * fade + right,
            lost=lost * fade + (here & (right < tried)),
        )

    def heard(self, right: Array, asked: Array) -> Tally:
        """The same rows, of which some [R] would have had their first guess right [R]."""
        fade = np.where(asked, _MEMORY, 1.0)
        return replace(self, won=self.won * fade + (asked & right), lost=self.lost * fade + (asked & ~right))

    def sized(self, size: Array) -> Tally:
        """The same rows, to guess so many [R] next."""
        return replace(self, size=size)

    @property
    def rate(self) -> Array:
        """How likely each row's next guess is right [R]."""
        return np.asarray(self.won / (self.won + self.lost))

    def report(self, row: int) -> Speculation:
        """What came of a row's guesses."""
        last = int(np.flatnonzero(self.tried[row])[-1]) + 1 if self.tried[row].any() else 0
        tried, right = (tuple(part[row, :last].tolist()) for part in (self.tried, self.right))
        return Speculation(tried, right, int(self.steps[row]))

    def _parts(self) -> Sequence[Array]:
        return self.place, self.steps, self.tried, self.right, self.size, self.won, self.lost

    def _widened(self, wide: int) -> Self:
        lacks = wide - self.tried.shape[1]
        if lacks <= 0:
            return self
        tried, right = (np.pad(part, ((0, 0), (0, lacks))) for part in (self.tried, self.right))
        return replace(self, tried=tried, right=right)


class Pace:
    """How wide a step pays: what forwards of so many positions take, measured as they are made.

    Before it is measured, and where a result must not depend on a clock, each further position of one row
    costs `SLOPE` of a forward, and of several rows as the root of their number, which is little: whatever
    might pay is tried. Time is no even function of the positions (a product of sixteen lines can take less
    than one of ten), so each count has its own.
    """

    SLOPE: Final = 0.1
    NETWORK: Final = 0.15  # what a network takes for one more guess of every row, in forwards
    MARGIN: Final = 1.1  # by how much guessing must look better: what looks best is partly luck
    LONGEST: Final = 64  # steps without a guess, before a network is asked for one again
    STALE: Final = 48  # steps after which it is measured again what one without guesses takes

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}  # positions fed -> seconds, the last few times
        # Seconds that a network takes for one guess of every row, the last few times.
        self._guesses: deque[float] = deque(maxlen=_SAMPLES)
        self._age = 0  # steps since one without guesses was measured
        self._quiet = 0  # steps since a network last guessed
        self._patience = 1

    def took(self, positions: int, seconds: float, width: int = 0) -> None:
        """Take in that a forward of so many positions took so long, with drafts of that width."""
        self._times.setdefault(positions, deque(maxlen=_SAMPLES)).append(seconds)
        self._age = self._age + 1 if width else 0

    def guessed(self, count: int, seconds: float) -> None:
        """Take in that guessing `count` tokens took so long."""
        self._guesses.append(seconds / count)

    def width(self, rate: Array, most: Array, cheap: bool, measured: bool) -> int:
        """How many tokens to try, where each row could try `most` and is right at that rate [R]."""
        longest, rows = int(most.max(initial=0)), len(rate)
        if not longest:
            return 0
        base = self._near(rows) if measured else None
        if measured and (base is None or self._age >= self.STALE):
            return 0  # what a step takes without guesses is to be known
        widths = np.arange(longest + 1)
        chance = np.clip(rate, 0.0, 0.999)[:, None]
        reach = np.minimum(widths, most[:, None])
        gain = ((1 - chance ** (reach + 1)) / (1 - chance)).sum(0)  # tokens a step
        cost = np.array([self._cost(rows, int(one), base) for one in widths])
        if not cheap:
            cost += widths * (median(self._guesses) / base if base and self._guesses else self.NETWORK)
        worth = gain / cost
        best = int(worth.argmax())
        best = best if worth[best] > self.MARGIN * worth[0] else 0
        return best if cheap else self._probed(best)

    def _probed(self, best: int) -> int:
        """The same, but now and then one guess where none pays: what is never asked cannot improve."""
        if best:
            self._quiet, self._patience = 0, 1
            return best
        self._quiet += 1
        if self._quiet < self._patience:
            return 0
        self._quiet, self._patience = 0, min(2 * self._patience, self.LONGEST)
        return 1

    def _near(self, rows: int) -> float | None:
        """What a step of so many rows takes without guesses, or one of nearly as many."""
        nearest = min(self._times, key=lambda count: abs(count - rows), default=None)
        if nearest is None or abs(nearest - rows) > rows // 4:
            return None
        return median(self._times[nearest])

    def _cost(self, rows: int, width: int, base: float | None) -> float:
        """What a step of that width costs, in steps without guesses."""
        wide = rows * (width + 1)
        usual = 1 + self.SLOPE * width * sqrt(rows)
        if base is None or not width or wide not in self._times:
            return usual
        known = max(median(self._times[wide]) / base, 1.0)
        # The first time much may have had to be prepared.
        return min(known, usual) if len(self._times[wide]) == 1 else known
