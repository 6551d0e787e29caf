"""The disjunction: alternatives of which one must stand in the text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from descant.decoding.constraints.automaton import AnyPhraseConstraint
from descant.decoding.constraints.base import parse_phrase
from descant.errors import InputError

__all__ = ["DisjunctiveConstraint"]


class DisjunctiveConstraint(AnyPhraseConstraint):
    """The demand that the text holds one of these phrases, none of which begins another."""

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        name = "nested_token_ids"
        if not isinstance(nested_token_ids, list | tuple) or not nested_token_ids:
            raise InputError(name, "must be a non-empty list of lists of token ids", nested_token_ids)
        self.token_ids = [parse_phrase(name, one) for one in nested_token_ids]
        # Sorted, a phrase stands right before those that it begins.
        ordered = sorted(self.token_ids)
        for one, following in itertools.pairwise(ordered):
            if following[: len(one)] == one:
                must = "must hold phrases of which none begins another"
                raise InputError(name, must, nested_token_ids, f"leave out {one} or {following}")
        super().__init__(self.token_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token_ids})"
