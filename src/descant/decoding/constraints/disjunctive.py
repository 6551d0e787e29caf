"""The disjunctive constraint: one of several phrases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from descant.decoding.constraints.automaton import AnyPhraseConstraint
from descant.decoding.constraints.base import parse_phrase
from descant.errors import InputError

__all__ = ["DisjunctiveConstraint"]


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
