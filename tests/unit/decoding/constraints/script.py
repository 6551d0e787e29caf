"""Scripts: calls in turn on constraints, the same here and at the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def run(classes: Any, words: Sequence[Any], script: Sequence[Any], alone: bool = False) -> list[Any]:
    """What each line of a script gives: a method's name and its arguments, or an attribute's name.

    `classes` is the module that has them. The subject is the list state of the constraints that `words` make,
    or the first of these `alone`; after `copy` it is the copy, and after `back` what it was before.
    """
    made = [
        classes.DisjunctiveConstraint(word) if isinstance(word[0], list) else classes.PhrasalConstraint(word)
        for word in words
    ]
    subjects = [made[0] if alone else classes.ConstraintListState(made)]
    given = []
    for name, *arguments in script:
        if name == "copy":
            subjects.append(subjects[-1].copy(stateful=True))
        elif name == "back":
            subjects.pop()
        else:
            value = getattr(subjects[-1], name)
            given.append(value(*arguments) if callable(value) else value)
    return given
