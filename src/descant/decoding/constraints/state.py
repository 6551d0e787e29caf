"""The state of a list of constraints: what one text has met of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Self

from descant.decoding.constraints.base import Constraint, token_of, tokens_of
from descant.errors import InputError

__all__ = ["ConstraintListState"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What never changes: shared by all states of a list."""

    constraints: list[Constraint]  # as they were given
    fresh: tuple[Constraint, ...]  # [C] our own copies; never updated
    whole: tuple[int, ...]  # [C] the steps each of them takes
    longest: int
    ordered: bool
    gap: int

    @classmethod
    def of(cls, given: Sequence[Constraint], ordered: bool, gap: int) -> _Plan:
        """The plan of constraints, checked."""
        must = "must be a non-empty list of Constraint objects"
        if not isinstance(given, list | tuple) or not given:
            raise InputError("constraints", must, given)
        if not all(isinstance(one, Constraint) for one in given):
            raise InputError("constraints", must, given)
        if type(gap) is not int or gap < 0:
            raise InputError("constraint_gap", "must be an int >= 0", gap)
        fresh = tuple(one.copy(stateful=False) for one in given)
        whole = tuple(one.remaining() for one in fresh)
        for one, steps in zip(fresh, whole, strict=True):
            if steps < 1:
                must = "must hold sound ones, of a new copy remaining() must be >= 1"
                raise InputError("constraints", must, one)
        # `seqlen` is no documented part of a constraint: a user's may lack it.
        longest = max(getattr(one, "seqlen", steps) for one, steps in zip(fresh, whole, strict=True))
        return cls(list(given), fresh, whole, longest, bool(ordered), gap)


class ConstraintListState:
    """What one text has met of a list of constraints.

    Each constraint reads every token for itself, so that phrases may overlap; `ordered` lets only the first
    of those not yet met read. After a constraint is met, `gap` tokens are read by none, and the others, which
    must lie wholly behind that gap, begin anew; of several met by the same token the first listed counts.

    The constraints given are never changed. Copies share their parts until a token changes them.
    """

    __slots__ = ("_left", "_met", "_now", "_own", "_plan", "_queue", "_quiet", "unmet")

    unmet: tuple[int, ...]  # places in the list of those not met

    def __init__(self, constraints: Sequence[Constraint], ordered: bool = False, gap: int = 0) -> None:
        self._plan = _Plan.of(constraints, ordered, gap)
        self._start()

    def _start(self) -> None:
        self.unmet = self._queue = tuple(range(len(self._plan.fresh)))
        self._met: tuple[int, ...] = ()  # places in the order in which they were met
        self._now = list(self._plan.fresh)  # [C]
        self._left = list(self._plan.whole)  # [C] remaining() of each
        self._own = 0  # a bit for each constraint that no other state holds
        self._quiet = 0  # tokens that none will read

    @property
    def constraints(self) -> list[Constraint]:
        """The constraints as they were given."""
        return self._plan.constraints

    @property
    def max_seqlen(self) -> int:
        """The steps that the longest constraint takes."""
        return self._plan.longest

    @property
    def completed(self) -> bool:
        """Whether all are met."""
        return not self.unmet

    @property
    def steps(self) -> int:
        """The steps that all of them take."""
        return sum(self._plan.whole)

    @property
    def met(self) -> int:
        """How many of these steps the text has made."""
        return self.steps - sum(self._left[place] for place in self.unmet)

    @property
    def complete_constraints(self) -> list[Constraint]:
        """Those that are met, in the order in which they were."""
        return [self._now[place] for place in self._met]

    @property
    def pending_constraints(self) -> list[Constraint]:
        """Those not begun, where one that broke off comes last."""
        return [self._now[place] for place in self._pending()]

    @property
    def inprogress_constraint(self) -> Constraint | None:
        """The one nearest to its end of those begun, the first listed of several; None if none is begun."""
        begun = self._begun()
        return self._now[min(begun, key=self._left.__getitem__)] if begun else None

    @property
    def least(self) -> int:
        """A number of tokens below which the rest cannot be met; exact where only one at a time may read."""
        if not self.unmet:
            return 0
        plan = self._plan
        left = [self._now[place].least for place in self.unmet]
        if not (plan.ordered or plan.gap):
            return max(left)  # the shorter ones may lie inside the longest
        anew = [plan.fresh[place].least for place in self.unmet]
        # Only the next one to be met keeps what it has read.
        kept = max(whole - rest for whole, rest in zip(anew, left, strict=True))
        return self._quiet + sum(anew) - kept + plan.gap * (len(anew) - 1)

    def get_bank(self) -> int:
        """How far the text has come, in steps as if all constraints were as long as the longest."""
        begun = self._begun()
        part = self.max_seqlen - min(self._left[place] for place in begun) if begun else 0
        return len(self._met) * self.max_seqlen + part

    def advance(self) -> list[int] | None:
        """The tokens that go on with what is begun, or else that begin something; None if no token does."""
        if self._quiet:
            return None
        places = self._begun() or (self.unmet[:1] if self._plan.ordered else self._pending())
        tokens = [token for place in places for token in tokens_of(self._now[place].advance())]
        return list(dict.fromkeys(tokens)) or None

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Read a token: whether it met a constraint (or all were met before), and whether any stepped."""
        token = token_of(token_id)
        if not self.unmet:
            return True, False
        if self._quiet:
            self._quiet -= 1
            return False, False
        complete = stepped = False
        now, left, whole = self._now, self._left, self._plan.whole
        for place in self.unmet[:1] if self._plan.ordered else self.unmet:
            if left[place] >= whole[place] and not now[place].does_advance(token):
                continue
            met, nearer = self._read(place, token)
            stepped |= nearer
            if met:
                complete = True
                self._meet(place)
                if self._plan.gap:
                    break
        return complete, stepped

    def reset(self, token_ids: Iterable[int] | None = None) -> None:
        """Begin anew, with a text of these tokens."""
        self._start()
        for token in () if token_ids is None else token_ids:
            self.add(token)
            if not self.unmet:
                break

    def copy(self, stateful: bool = True) -> Self:
        """Another state of the same list, with what this one has read or with nothing read."""
        new = object.__new__(type(self))
        new._plan = self._plan
        if not stateful:
            new._start()
            return new
        new.unmet, new._queue, new._met, new._quiet = self.unmet, self._queue, self._met, self._quiet
        new._now, new._left = self._now[:], self._left[:]
        new._own = self._own = 0
        return new

    def _begun(self) -> list[int]:
        whole, left = self._plan.whole, self._left
        return [place for place in self.unmet if left[place] < whole[place]]

    def _pending(self) -> list[int]:
        whole, left = self._plan.whole, self._left
        return [place for place in self._queue if left[place] >= whole[place]]

    def _read(self, place: int, token: int) -> tuple[bool, bool]:
        """Let a constraint, begun or to be begun, read a token: is it met, and has it come nearer."""
        one = self._now[place]
        begun = self._left[place] < self._plan.whole[place]
        if not self._own >> place & 1:
            one = self._now[place] = one.copy(stateful=True)
            self._own |= 1 << place
        stepped, completed, broken = one.update(token)
        if completed:
            return True, True
        if broken:
            self._drop(place)
            # The token that broke it may begin it again, which brings it no nearer unless it is met by that.
            again = begun and self._now[place].does_advance(token) and self._read(place, token)[0]
            return again, again
        if not begun and not stepped:
            name = type(one).__name__
            must = f"must hold sound ones, in {name} update() must step where does_advance() is true"
            raise InputError("constraints", must, token)
        self._left[place] = one.remaining()
        return False, stepped

    def _meet(self, place: int) -> None:
        self.unmet = tuple(other for other in self.unmet if other != place)
        self._queue = tuple(other for other in self._queue if other != place)
        self._met += (place,)
        if self._plan.gap:
            self._quiet = self._plan.gap
            for other in self._begun():
                self._drop(other)

    def _drop(self, place: int) -> None:
        self._now[place], self._left[place] = self._plan.fresh[place], self._plan.whole[place]
        self._own &= ~(1 << place)
        self._queue = (*(other for other in self._queue if other != place), place)
