"""The kinds of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["KIND_METHODS", "RECIPE_KINDS", "REQUIRED_MEMBERS"]

# Kind -> positional arguments of its callable.
RECIPE_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": ("model",),
    "strategy": ("noise", "stop", "rank_group"),
    "drafter": (),
    "processor": (),
    "wrapper": ("inner",),
}
# Methods by which the kind of a class is recognised.
KIND_METHODS: Final = {
    "strategy": ("propose", "select", "finish"),
    "drafter": ("draft",),
    "wrapper": ("forward", "wrap_cache"),
    "processor": ("process",),
}
# Members that the engine requires of the object that a recipe builds.
REQUIRED_MEMBERS: Final = {
    "strategy": ("needs_log_probs", "columns", "propose", "select", "finish", "drop", "finished_so_far"),
    "drafter": ("is_model_free", "add_requests", "remove_requests", "commit", "draft"),
    "wrapper": ("traits", "wrap_cache", "forward"),
}
