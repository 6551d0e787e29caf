"""The state of a list of constraints: what one text has met of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Self

from descant.decoding.constraints.base import Constraint, as_token_id, as_token_ids
from descant.errors import InputError

__all__ = ["ConstraintListState"]


@dataclasses.dataclass(frozen=True, slots=True)
class _ConstraintSpec:
    """What never changes: shared by all states of a list."""

    constraints: list[Constraint]  # as they were given
    initial: tuple[Constraint, ...]  # [C] our own copies; never updated
    total_steps: tuple[int, ...]  # [C] the steps each of them takes
    max_seqlen: int
    ordered: bool
    gap: int

    @classmethod
    def build(cls, given: Sequence[Constraint], ordered: bool, gap: int) -> _ConstraintSpec:
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

    __slots__ = (
        "_current",
        "_gap_left",
        "_met_order",
        "_owned_mask",
        "_pending_order",
        "_remaining",
        "_spec",
        "unmet_indices",
    )

    unmet_indices: tuple[int, ...]  # places in the list of those not met

    def __init__(self, constraints: Sequence[Constraint], ordered: bool = False, gap: int = 0) -> None:
        self._spec = _ConstraintSpec.build(constraints, ordered, gap)
        self._reset_state()

    def _reset_state(self) -> None:
        self.unmet_indices = self._pending_order = tuple(range(len(self._spec.initial)))
        self._met_order: tuple[int, ...] = ()  # places in the order in which they were met
        self._current = list(self._spec.initial)  # [C]
        self._remaining = list(self._spec.total_steps)  # [C] remaining() of each
        self._owned_mask = 0  # a bit for each constraint that no other state holds
        self._gap_left = 0  # tokens that none will read

    @property
    def constraints(self) -> list[Constraint]:
        """The constraints as they were given."""
        return self._spec.constraints

    @property
    def max_seqlen(self) -> int:
        """The steps that the longest constraint takes."""
        return self._spec.max_seqlen

    @property
    def completed(self) -> bool:
        """Whether all are met."""
        return not self.unmet_indices

    @property
    def total_steps(self) -> int:
        """The steps that all of them take."""
        return sum(self._spec.total_steps)

    @property
    def steps_met(self) -> int:
        """How many of these steps the text has made."""
        return self.total_steps - sum(self._remaining[place] for place in self.unmet_indices)

    @property
    def complete_constraints(self) -> list[Constraint]:
        """Those that are met, in the order in which they were."""
        return [self._current[place] for place in self._met_order]

    @property
    def pending_constraints(self) -> list[Constraint]:
        """Those not begun, where one that broke off comes last."""
        return [self._current[place] for place in self._pending_indices()]

    @property
    def inprogress_constraint(self) -> Constraint | None:
        """The one nearest to its end of those begun, the first listed of several; None if none is begun."""
        begun = self._started_indices()
        return self._current[min(begun, key=self._remaining.__getitem__)] if begun else None

    @property
    def min_tokens_left(self) -> int:
        """A number of tokens below which the rest cannot be met; exact where only one at a time may read."""
        if not self.unmet_indices:
            return 0
        plan = self._spec
        left = [self._current[place].min_tokens_left for place in self.unmet_indices]
        if not (plan.ordered or plan.gap):
            return max(left)  # the shorter ones may lie inside the longest
        anew = [plan.initial[place].min_tokens_left for place in self.unmet_indices]
        # Only the next one to be met keeps what it has read.
        kept = max(whole - rest for whole, rest in zip(anew, left, strict=True))
        return self._gap_left + sum(anew) - kept + plan.gap * (len(anew) - 1)

    def get_bank(self) -> int:
        """How far the text has come, in steps as if all constraints were as long as the longest."""
        begun = self._started_indices()
        part = self.max_seqlen - min(self._remaining[place] for place in begun) if begun else 0
        return len(self._met_order) * self.max_seqlen + part

    def advance(self) -> list[int] | None:
        """The tokens that go on with what is begun, or else that begin something; None if no token does."""
        if self._gap_left:
            return None
        places = self._started_indices() or (
            self.unmet_indices[:1] if self._spec.ordered else self._pending_indices()
        )
        tokens = [token for place in places for token in as_token_ids(self._current[place].advance())]
        return list(dict.fromkeys(tokens)) or None

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Read a token: whether it met a constraint (or all were met before), and whether any stepped."""
        token = as_token_id(token_id)
        if not self.unmet_indices:
            return True, False
        if self._gap_left:
            self._gap_left -= 1
            return False, False
        complete = stepped = False
        now, left, whole = self._current, self._remaining, self._spec.total_steps
        for place in self.unmet_indices[:1] if self._spec.ordered else self.unmet_indices:
            if left[place] >= whole[place] and not now[place].does_advance(token):
                continue
            met, nearer = self._update_constraint(place, token)
            stepped |= nearer
            if met:
                complete = True
                self._mark_met(place)
                if self._spec.gap:
                    break
        return complete, stepped

    def reset(self, token_ids: Iterable[int] | None = None) -> None:
        """Begin anew, with a text of these tokens."""
        self._reset_state()
        for token in () if token_ids is None else token_ids:
            self.add(token)
            if not self.unmet_indices:
                break

    def copy(self, stateful: bool = True) -> Self:
        """Another state of the same list, with what this one has read or with nothing read."""
        new = object.__new__(type(self))
        new._spec = self._spec
        if not stateful:
            new._reset_state()
            return new
        new.unmet_indices, new._pending_order, new._met_order, new._gap_left = (
            self.unmet_indices,
            self._pending_order,
            self._met_order,
            self._gap_left,
        )
        new._current, new._remaining = self._current[:], self._remaining[:]
        new._owned_mask = self._owned_mask = 0
        return new

    def _started_indices(self) -> list[int]:
        whole, left = self._spec.total_steps, self._remaining
        return [place for place in self.unmet_indices if left[place] < whole[place]]

    def _pending_indices(self) -> list[int]:
        whole, left = self._spec.total_steps, self._remaining
        return [place for place in self._pending_order if left[place] >= whole[place]]

    def _update_constraint(self, place: int, token: int) -> tuple[bool, bool]:
        """Let a constraint, begun or to be begun, read a token: is it met, and has it come nearer."""
        one = self._current[place]
        begun = self._remaining[place] < self._spec.total_steps[place]
        if not self._owned_mask >> place & 1:
            one = self._current[place] = one.copy(stateful=True)
            self._owned_mask |= 1 << place
        stepped, completed, broken = one.update(token)
        if completed:
            return True, True
        if broken:
            self._reset_constraint(place)
            # The token that broke it may begin it again, which brings it no nearer unless it is met by that.
            again = (
                begun
                and self._current[place].does_advance(token)
                and self._update_constraint(place, token)[0]
            )
            return again, again
        if not begun and not stepped:
            name = type(one).__name__
            must = f"must hold sound ones, in {name} update() must step where does_advance() is true"
            raise InputError("constraints", must, token)
        self._remaining[place] = one.remaining()
        return False, stepped

    def _mark_met(self, place: int) -> None:
        self.unmet_indices = tuple(other for other in self.unmet_indices if other != place)
        self._pending_order = tuple(other for other in self._pending_order if other != place)
        self._met_order += (place,)
        if self._spec.gap:
            self._gap_left = self._spec.gap
            for other in self._started_indices():
                self._reset_constraint(other)

    def _reset_constraint(self, place: int) -> None:
        self._current[place], self._remaining[place] = (
            self._spec.initial[place],
            self._spec.total_steps[place],
        )
        self._owned_mask &= ~(1 << place)
        self._pending_order = (*(other for other in self._pending_order if other != place), place)
