"""`force_words_ids`: constraints given as lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from descant.decoding.constraints.base import Constraint
from descant.decoding.constraints.disjunctive import DisjunctiveConstraint
from descant.decoding.constraints.phrasal import PhrasalConstraint
from descant.errors import InputError

__all__ = ["parse_force_words"]


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
