"""The phrasal constraint: consecutive tokens."""

from __future__ import annotations

from collections.abc import Sequence

from descant.decoding.constraints.automaton import AnyPhraseConstraint
from descant.decoding.constraints.base import parse_phrase

__all__ = ["PhrasalConstraint"]


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
