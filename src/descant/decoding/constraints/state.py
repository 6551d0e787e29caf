"""The progress of one text through a list of constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Self

from descant.decoding.constraints.base import Constraint, as_token_id, as_token_ids
from descant.errors import InputError

__all__ = ["ConstraintListState"]


@dataclasses.dataclass(frozen=True, slots=True)
class _ConstraintSpec:
    """The fixed part, shared by all states of a list."""

    constraints: list[Constraint]  # as given
    initial: tuple[Constraint, ...]  # [C] private copies, never updated
    total_steps: tuple[int, ...]  # [C] steps of each constraint
    max_seqlen: int
    ordered: bool
    gap: int

    @classmethod
    def build(cls, constraints: Sequence[Constraint], ordered: bool, gap: int) -> _ConstraintSpec:
        """Validate the constraints."""
        must = "must be a non-empty list of Constraint objects"
        if not isinstance(constraints, list | tuple) or not constraints:
            raise InputError("constraints", must, constraints)
        if not all(isinstance(constraint, Constraint) for constraint in constraints):
            raise InputError("constraints", must, constraints)
        if type(gap) is not int or gap < 0:
            raise InputError("constraint_gap", "must be an int >= 0", gap)
        copies = tuple(constraint.copy(stateful=False) for constraint in constraints)
        total_steps = tuple(constraint.remaining() for constraint in copies)
        for constraint, steps in zip(copies, total_steps, strict=True):
            if steps < 1:
                must = "must be valid: remaining() of a new copy must be >= 1"
                raise InputError("constraints", must, constraint)
        # `seqlen` is not part of the documented interface: a user's constraint may lack it.
        longest = max(
            getattr(constraint, "seqlen", steps)
            for constraint, steps in zip(copies, total_steps, strict=True)
        )
        return cls(list(constraints), copies, total_steps, longest, bool(ordered), gap)


class ConstraintListState:
    """The progress of one text through a list of constraints.

    Every constraint reads every token, so phrases may overlap; with `ordered` only the first unmet one reads.
    After a constraint is met, none reads the next `gap` tokens, and the others start again after the gap. If
    one token meets several, the first listed counts.

    The given constraints are never modified. Copies share state until a token changes it.
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

    unmet_indices: tuple[int, ...]  # indices of the unmet constraints

    def __init__(self, constraints: Sequence[Constraint], ordered: bool = False, gap: int = 0) -> None:
        self._spec = _ConstraintSpec.build(constraints, ordered, gap)
        self._reset_state()

    def _reset_state(self) -> None:
        """Return to the state before any token."""
        self.unmet_indices = self._pending_order = tuple(range(len(self._spec.initial)))
        self._met_order: tuple[int, ...] = ()  # indices, in the order they were met
        self._current = list(self._spec.initial)  # [C]
        self._remaining = list(self._spec.total_steps)  # [C] remaining() of each
        self._owned_mask = 0  # one bit per constraint not shared with other states
        self._gap_left = 0  # tokens left of the gap

    @property
    def constraints(self) -> list[Constraint]:
        """The constraints as given."""
        return self._spec.constraints

    @property
    def max_seqlen(self) -> int:
        """The steps of the longest constraint."""
        return self._spec.max_seqlen

    @property
    def completed(self) -> bool:
        """Whether all are met."""
        return not self.unmet_indices

    @property
    def total_steps(self) -> int:
        """The steps of all constraints."""
        return sum(self._spec.total_steps)

    @property
    def steps_met(self) -> int:
        """The number of steps met."""
        return self.total_steps - sum(self._remaining[index] for index in self.unmet_indices)

    @property
    def complete_constraints(self) -> list[Constraint]:
        """The met constraints, in the order they were met."""
        return [self._current[index] for index in self._met_order]

    @property
    def pending_constraints(self) -> list[Constraint]:
        """The constraints not started; one that was broken comes last."""
        return [self._current[index] for index in self._pending_indices()]

    @property
    def inprogress_constraint(self) -> Constraint | None:
        """The started constraint with the fewest steps left, the first listed on ties; None if none."""
        started = self._started_indices()
        return self._current[min(started, key=self._remaining.__getitem__)] if started else None

    @property
    def min_tokens_left(self) -> int:
        """A lower bound on the tokens needed; exact if only one constraint reads at a time."""
        if not self.unmet_indices:
            return 0
        spec = self._spec
        remaining = [self._current[index].min_tokens_left for index in self.unmet_indices]
        if not (spec.ordered or spec.gap):
            return max(remaining)  # shorter phrases may lie inside the longest
        from_start = [spec.initial[index].min_tokens_left for index in self.unmet_indices]
        # Only the next constraint to be met keeps its progress.
        max_progress = max(
            whole - tokens_left for whole, tokens_left in zip(from_start, remaining, strict=True)
        )
        return self._gap_left + sum(from_start) - max_progress + spec.gap * (len(from_start) - 1)

    def get_bank(self) -> int:
        """The progress in steps, counting every constraint as long as the longest."""
        started = self._started_indices()
        partial = self.max_seqlen - min(self._remaining[index] for index in started) if started else 0
        return len(self._met_order) * self.max_seqlen + partial

    def advance(self) -> list[int] | None:
        """The tokens that continue started constraints, or else start one; None if no token does."""
        if self._gap_left:
            return None
        indices = self._started_indices() or (
            self.unmet_indices[:1] if self._spec.ordered else self._pending_indices()
        )
        tokens = [token for index in indices for token in as_token_ids(self._current[index].advance())]
        return list(dict.fromkeys(tokens)) or None

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Read a token: whether it met a constraint (or all were met), and whether any advanced."""
        token = as_token_id(token_id)
        if not self.unmet_indices:
            return True, False
        if self._gap_left:
            self._gap_left -= 1
            return False, False
        complete = stepped = False
        current, remaining, total_steps = self._current, self._remaining, self._spec.total_steps
        for index in self.unmet_indices[:1] if self._spec.ordered else self.unmet_indices:
            if remaining[index] >= total_steps[index] and not current[index].does_advance(token):
                continue
            is_met, advanced = self._update_constraint(index, token)
            stepped |= advanced
            if is_met:
                complete = True
                self._mark_met(index)
                if self._spec.gap:
                    break
        return complete, stepped

    def reset(self, token_ids: Iterable[int] | None = None) -> None:
        """Start again with a text of these tokens."""
        self._reset_state()
        for token in () if token_ids is None else token_ids:
            self.add(token)
            if not self.unmet_indices:
                break

    def copy(self, stateful: bool = True) -> Self:
        """Another state of the same list; `stateful` keeps the progress."""
        new = object.__new__(type(self))
        new._spec = self._spec
        if not stateful:
            new._reset_state()
            return new
        new.unmet_indices, new._pending_order = self.unmet_indices, self._pending_order
        new._met_order, new._gap_left = self._met_order, self._gap_left
        new._current, new._remaining = self._current[:], self._remaining[:]
        new._owned_mask = self._owned_mask = 0
        return new

    def _started_indices(self) -> list[int]:
        total_steps, remaining = self._spec.total_steps, self._remaining
        return [index for index in self.unmet_indices if remaining[index] < total_steps[index]]

    def _pending_indices(self) -> list[int]:
        total_steps, remaining = self._spec.total_steps, self._remaining
        return [index for index in self._pending_order if remaining[index] >= total_steps[index]]

    def _update_constraint(self, index: int, token: int) -> tuple[bool, bool]:
        """Pass a token to a constraint: whether it is met, and whether it advanced."""
        constraint = self._current[index]
        is_started = self._remaining[index] < self._spec.total_steps[index]
        if not self._owned_mask >> index & 1:
            constraint = self._current[index] = constraint.copy(stateful=True)
            self._owned_mask |= 1 << index
        stepped, completed, broken = constraint.update(token)
        if completed:
            return True, True
        if broken:
            self._reset_constraint(index)
            # The breaking token may start it again; that is progress only if it meets the constraint.
            is_met = (
                is_started
                and self._current[index].does_advance(token)
                and self._update_constraint(index, token)[0]
            )
            return is_met, is_met
        if not is_started and not stepped:
            name = type(constraint).__name__
            must = f"must be valid: in {name} update() must step where does_advance() is true"
            raise InputError("constraints", must, token)
        self._remaining[index] = constraint.remaining()
        return False, stepped

    def _mark_met(self, index: int) -> None:
        self.unmet_indices = tuple(other for other in self.unmet_indices if other != index)
        self._pending_order = tuple(other for other in self._pending_order if other != index)
        self._met_order += (index,)
        if self._spec.gap:
            self._gap_left = self._spec.gap
            for other in self._started_indices():
                self._reset_constraint(other)

    def _reset_constraint(self, index: int) -> None:
        self._current[index] = self._spec.initial[index]
        self._remaining[index] = self._spec.total_steps[index]
        self._owned_mask &= ~(1 << index)
        self._pending_order = (*(other for other in self._pending_order if other != index), index)
