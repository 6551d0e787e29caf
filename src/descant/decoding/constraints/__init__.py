"""Constraints on the text of constrained beam search."""

from descant.decoding.constraints.base import (
    Constraint,
    DisjunctiveConstraint,
    PhrasalConstraint,
    parse_force_words,
)
from descant.decoding.constraints.state import ConstraintListState

__all__ = [
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
    "parse_force_words",
]
