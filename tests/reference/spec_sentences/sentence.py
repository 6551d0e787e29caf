"""What a sentence is: where it is documented, what it says, and the check that shows it.

A check is a function of one argument, the library (`tests/reference/spec_sentences/library.py`). It raises if
the sentence does not hold there. What it returns is compared between the two sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The documents by title. Lines of the guides are lines of the page; lines of the reference pages are those of
# the module of transformers 4.52.4 whose docstrings the page shows.
STRATEGIES = "Text generation strategies"
NEWER = "Generation strategies"
AUTOREGRESSIVE = "Autoregressive generation"
UTILITIES = "Utilities for generation"
NOTES = "Different decoding strategies"
CONFIG = "GenerationConfig (generation/configuration_utils.py)"
GENERATE = "GenerationMixin.generate (generation/utils.py)"
CACHES = "Caches (cache_utils.py)"
LOGITS = "Logits processors (generation/logits_process.py)"
CRITERIA = "Stopping criteria (generation/stopping_criteria.py)"
CONSTRAINTS = "Constraints (generation/beam_constraints.py)"
STREAMERS = "Streamers (generation/streamers.py)"
WATERMARKING = "Watermarking (generation/watermarking.py)"

Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Sentence:
    """One documented sentence."""

    name: str
    document: str
    line: int
    text: str  # in our own words
    check: Check
    ours: str  # why Descant differs by design; empty if it does as documented
    theirs: str  # why 4.52.4 does not do what it documents; empty if it does


SENTENCES: dict[str, Sentence] = {}


def page(document: str) -> Callable[..., Callable[[Check], Check]]:
    """`says(name, line, text)`, a decorator that registers a check as a sentence of one document."""

    def says(
        name: str, line: int, text: str, *, ours: str = "", theirs: str = ""
    ) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            assert name not in SENTENCES, f"two sentences are called {name}"
            SENTENCES[name] = Sentence(name, document, line, text, check, ours, theirs)
            return check

        return register

    return says


def observe(name: str, library: Any) -> dict[str, Any]:
    """Whether a sentence holds in a library, what its check returned, and what it raised."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            value = SENTENCES[name].check(library)
    except Exception as error:
        return {"holds": False, "value": None, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {"holds": True, "value": value, "error": ""}


def same(ours: Any, theirs: Any, near: float = 2e-4) -> bool:
    """Whether two observed values are equal, numbers up to rounding."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape:
            return False
        return bool(torch.allclose(ours.double(), theirs.double(), rtol=near, atol=near, equal_nan=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], near) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(
            same(one, other, near) for one, other in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, float) and isinstance(theirs, float) and ours == ours:
        return abs(ours - theirs) <= near * max(1.0, abs(ours)) or ours == theirs
    return bool(ours == theirs) and type(ours) is type(theirs)
