"""The constraint: a demand on a text that is met one token after another."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

from descant.errors import InputError

__all__ = ["Constraint", "UpdateResult", "as_token_id", "as_token_ids", "parse_phrase"]

UpdateResult = tuple[bool, bool, bool]  # stepped, completed, reset
_MAX_TEST_UPDATES = 10_000  # updates after which a constraint is taken to have no end


class Constraint(ABC):
    """A demand on a text, and how much of it the tokens read so far have met.

    Subclasses set their own fields first and then call `super().__init__()`, which runs `test`.
    """

    def __init__(self) -> None:
        self.test()

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """The token, or the tokens, any of which brings it a step nearer; None when it is met."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Whether this token would bring it nearer."""

    @abstractmethod
    def update(self, token_id: int) -> UpdateResult:
        """Read a token: did it step nearer, is it met now, is nothing left of what it had."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to where nothing was read."""

    @abstractmethod
    def remaining(self) -> int:
        """How many steps are left; 0 when it is met."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """The same constraint as another object: with what it has read, or with nothing read."""

    @property
    def min_tokens_left(self) -> int:
        """The fewest tokens that can meet it from here."""
        return self.remaining()

    def test(self) -> None:
        """Refuse a constraint that does not come to its end by its own `advance`; leaves nothing read."""
        whole = self.remaining()
        if whole < 1:
            raise self._invalid_error("remaining() must be >= 1 where nothing was read", whole)
        if not self._check_step():
            self._check_reset(whole)
            for _ in range(_MAX_TEST_UPDATES):
                if self._check_step():
                    break
            else:
                raise self._invalid_error(
                    "update(advance()) must complete it", f"no end in {_MAX_TEST_UPDATES} updates"
                )
        if self.remaining() != 0:
            raise self._invalid_error("remaining() must be 0 once it is complete", self.remaining())
        self._check_reset(whole)

    def _check_step(self) -> bool:
        tokens = as_token_ids(self.advance())
        if not tokens:
            raise self._invalid_error("advance() must give a token while it is not complete", self.advance())
        strange = [token for token in tokens if not self.does_advance(token)]
        if strange:
            raise self._invalid_error("does_advance() must be true of every token of advance()", strange)
        answer: Any = self.update(tokens[0])
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise self._invalid_error("update() must return (stepped, completed, reset)", answer)
        if not answer[0]:
            raise self._invalid_error("update() must step where does_advance() is true", answer)
        return bool(answer[1])

    def _check_reset(self, whole: int) -> None:
        self.reset()
        if self.remaining() != whole:
            raise self._invalid_error(f"remaining() must be {whole} again after reset()", self.remaining())

    def _invalid_error(self, must: str, got: object) -> InputError:
        return InputError("constraints", f"must hold sound ones, in {type(self).__name__} {must}", got)


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
    """What `advance` gave, as a list."""
    if advance is None:
        return []
    return (
        [as_token_id(one) for one in advance] if isinstance(advance, list | tuple) else [as_token_id(advance)]
    )


def parse_phrase(name: str, value: Any) -> list[int]:
    """A phrase given as the argument `name`: token ids, at least one."""
    must = "must be a non-empty list of token ids (ints >= 0)"
    if not isinstance(value, list | tuple) or not value:
        raise InputError(name, must, value)
    try:
        tokens = [as_token_id(one) for one in value]
    except InputError:
        raise InputError(name, must, value) from None
    if min(tokens) < 0:
        raise InputError(name, must, value)
    return tokens
