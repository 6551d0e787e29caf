"""The base class of constraints: conditions on a text that are met token by token."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

from descant.errors import InputError

__all__ = ["Constraint", "UpdateResult", "as_token_id", "as_token_ids", "parse_phrase"]

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
