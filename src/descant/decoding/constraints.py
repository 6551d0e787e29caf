"""Constraints on the text of constrained beam search, met token by token."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from descant.errors import InputError

UpdateResult = tuple[bool, bool, bool]  # stepped, completed, reset
_MAX_TEST_UPDATES = 10_000  # a constraint that needs more updates counts as endless


class Constraint(ABC):
    """A condition on a text, with the progress made by the tokens read so far.

    Subclasses set their fields first and then call `super().__init__()`, which runs `test`.
    """

    def __init__(self) -> None:
        self.test()

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """The token or tokens that advance it by one step; None when met."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Whether this token advances it."""

    @abstractmethod
    def update(self, token_id: int) -> UpdateResult:
        """Read a token: (stepped, completed, reset)."""

    @abstractmethod
    def reset(self) -> None:
        """Return to the state before any token."""

    @abstractmethod
    def remaining(self) -> int:
        """The number of steps left; 0 when met."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """A copy of the constraint; `stateful` keeps the progress."""

    @property
    def min_tokens_left(self) -> int:
        """The fewest tokens that can still meet it."""
        return self.remaining()

    def test(self) -> None:
        """Raise unless following `advance` completes the constraint; ends in the reset state."""
        total_steps = self.remaining()
        if total_steps < 1:
            raise self._invalid_error("remaining() must be >= 1 before any token", total_steps)
        if not self._check_step():
            self._check_reset(total_steps)
            for _ in range(_MAX_TEST_UPDATES):
                if self._check_step():
                    break
            else:
                raise self._invalid_error(
                    "update(advance()) must complete it", f"no end in {_MAX_TEST_UPDATES} updates"
                )
        if self.remaining() != 0:
            raise self._invalid_error("remaining() must be 0 once it is complete", self.remaining())
        self._check_reset(total_steps)

    def _check_step(self) -> bool:
        tokens = as_token_ids(self.advance())
        if not tokens:
            raise self._invalid_error("advance() must give a token while it is not complete", self.advance())
        rejected = [token for token in tokens if not self.does_advance(token)]
        if rejected:
            raise self._invalid_error("does_advance() must be true of every token of advance()", rejected)
        result: Any = self.update(tokens[0])
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise self._invalid_error("update() must return (stepped, completed, reset)", result)
        if not result[0]:
            raise self._invalid_error("update() must step where does_advance() is true", result)
        return bool(result[1])

    def _check_reset(self, total_steps: int) -> None:
        self.reset()
        if self.remaining() != total_steps:
            raise self._invalid_error(
                f"remaining() must be {total_steps} again after reset()", self.remaining()
            )

    def _invalid_error(self, must: str, got: object) -> InputError:
        return InputError("constraints", f"must be valid: in {type(self).__name__} {must}", got)


def as_token_id(value: Any) -> int:
    """A token id as an int."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InputError("token_id", "must be an int", value)


def as_token_ids(advance: Any) -> list[int]:
    """The return value of `advance` as a list."""
    if advance is None:
        return []
    return (
        [as_token_id(token) for token in advance]
        if isinstance(advance, list | tuple)
        else [as_token_id(advance)]
    )


def parse_phrase(name: str, value: Any) -> list[int]:
    """A phrase passed as the argument `name`: a non-empty list of token ids."""
    must = "must be a non-empty list of token ids (ints >= 0)"
    if not isinstance(value, list | tuple) or not value:
        raise InputError(name, must, value)
    try:
        tokens = [as_token_id(token) for token in value]
    except InputError:
        raise InputError(name, must, value) from None
    if min(tokens) < 0:
        raise InputError(name, must, value)
    return tokens


class AhoCorasick(NamedTuple):
    """The trie of several phrases with failure links (Aho and Corasick, 1975); node 0 is the root."""

    children: list[dict[int, int]]  # [S] child node by token
    failure_links: list[int]  # [S] node of the longest proper suffix in the trie
    depth: list[int]  # [S] tokens from the root
    is_match: list[bool]  # [S] whether a phrase ends at the node
    min_remaining: list[int]  # [S] fewest tokens to the end of a phrase

    @classmethod
    def from_phrases(cls, phrases: Sequence[Sequence[int]]) -> AhoCorasick:
        """The automaton of non-empty phrases, none a prefix of another."""
        children: list[dict[int, int]] = [{}]
        for phrase in phrases:
            node = 0
            for token in phrase:
                if token not in children[node]:
                    children[node][token] = len(children)
                    children.append({})
                node = children[node][token]
        size = len(children)
        automaton = cls(children, [0] * size, [0] * size, [not edges for edges in children], [0] * size)
        automaton._build_links()
        return automaton

    def _build_links(self) -> None:
        order = [0]  # breadth first: a failure link always leads to a shorter path
        for node in order:
            for token, child in self.children[node].items():
                order.append(child)
                self.depth[child] = self.depth[node] + 1
                if node:
                    self.failure_links[child] = self.next_node(self.failure_links[node], token)
                    self.is_match[child] |= self.is_match[self.failure_links[child]]
        for node in reversed(order):
            if not self.is_match[node]:
                self.min_remaining[node] = 1 + min(
                    self.min_remaining[child] for child in self.children[node].values()
                )
        for node in order[1:]:
            self.min_remaining[node] = min(
                self.min_remaining[node], self.min_remaining[self.failure_links[node]]
            )

    def next_node(self, node: int, token: int) -> int:
        """The node of the longest suffix of the text, this token included, in the trie."""
        while node and token not in self.children[node]:
            node = self.failure_links[node]
        return self.children[node].get(token, 0)


class AnyPhraseConstraint(Constraint):
    """The text must contain one of several phrases; once met, it stays met."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        # Skip `test`: these phrases are valid, and a subclass may not be initialised yet.
        self.seqlen = max(map(len, phrases))
        self._automaton = AhoCorasick.from_phrases(phrases)
        self._node = 0

    @property
    def completed(self) -> bool:
        """Whether the constraint is met."""
        return self._automaton.is_match[self._node]

    @property
    def min_tokens_left(self) -> int:
        """The fewest tokens that can still meet it."""
        return self._automaton.min_remaining[self._node]

    def advance(self) -> int | list[int] | None:
        """The tokens that continue the longest started phrase."""
        return None if self.completed else list(self._automaton.children[self._node])

    def does_advance(self, token_id: int) -> bool:
        """Whether this token continues the longest started phrase or completes any."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False
        return token in automaton.children[node] or (
            node > 0 and automaton.is_match[automaton.next_node(node, token)]
        )

    def update(self, token_id: int) -> UpdateResult:
        """Read a token; on a mismatch the longest matching suffix remains."""
        token, automaton, node = as_token_id(token_id), self._automaton, self._node
        if automaton.is_match[node]:
            return False, True, False
        self._node = next_node = automaton.next_node(node, token)
        completed = automaton.is_match[next_node]
        return completed or automaton.depth[next_node] > automaton.depth[node], completed, next_node == 0

    def reset(self) -> None:
        """Return to the state before any token."""
        self._node = 0

    def remaining(self) -> int:
        """The tokens left of the longest phrase, counted from the started one; 0 when met."""
        return 0 if self.completed else self.seqlen - self._automaton.depth[self._node]

    def copy(self, stateful: bool = False) -> Self:
        """A copy that shares the automaton; `stateful` keeps the progress."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not stateful:
            new.reset()
        return new


class PhrasalConstraint(AnyPhraseConstraint):
    """The text must contain this phrase."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = parse_phrase("token_ids", token_ids)
        super().__init__([self.token_ids])

    def advance(self) -> int | None:
        """The next token of the phrase."""
        return None if self.completed else self.token_ids[self._automaton.depth[self._node]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token_ids})"


class DisjunctiveConstraint(AnyPhraseConstraint):
    """The text must contain one of these phrases, none a prefix of another."""

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        name = "nested_token_ids"
        if not isinstance(nested_token_ids, list | tuple) or not nested_token_ids:
            raise InputError(name, "must be a non-empty list of lists of token ids", nested_token_ids)
        self.token_ids = [parse_phrase(name, phrase) for phrase in nested_token_ids]
        # In sorted order a prefix directly precedes the phrases it begins.
        ordered = sorted(self.token_ids)
        for phrase, following in itertools.pairwise(ordered):
            if following[: len(phrase)] == phrase:
                must = "must have no phrase that is a prefix of another"
                raise InputError(name, must, nested_token_ids, f"remove {phrase} or {following}")
        super().__init__(self.token_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token_ids})"


def parse_force_words(words: Sequence[Any]) -> list[Constraint]:
    """One phrase for each list of token ids, one disjunction for each list of such lists."""
    must = "must be a non-empty list of words, each a list of token ids or a list of such lists"
    if not isinstance(words, list | tuple) or not words:
        raise InputError("force_words_ids", must, words)
    constraints: list[Constraint] = []
    for word in words:
        if not isinstance(word, list | tuple):
            raise InputError("force_words_ids", must, words)
        try:
            is_disjunction = any(isinstance(part, list | tuple) for part in word)
            constraints.append(DisjunctiveConstraint(word) if is_disjunction else PhrasalConstraint(word))
        except InputError as error:
            raise InputError("force_words_ids", must, words, str(error)) from None
    return constraints


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
