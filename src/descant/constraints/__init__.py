"""Constraints: what a beam's text must come to hold."""

from descant.constraints.base import Constraint
from descant.constraints.disjunctive import DisjunctiveConstraint
from descant.constraints.phrasal import PhrasalConstraint
from descant.constraints.state import ConstraintListState
from descant.constraints.words import forced

__all__ = ["Constraint", "ConstraintListState", "DisjunctiveConstraint", "PhrasalConstraint", "forced"]
