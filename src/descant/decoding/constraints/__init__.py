"""Constraints on the text of constrained beam search."""

from descant.decoding.constraints.base import Constraint
from descant.decoding.constraints.disjunctive import DisjunctiveConstraint
from descant.decoding.constraints.force_words import parse_force_words
from descant.decoding.constraints.phrasal import PhrasalConstraint
from descant.decoding.constraints.state import ConstraintListState

__all__ = [
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
    "parse_force_words",
]
