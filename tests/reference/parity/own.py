"""Custom parts of a user, built here and in the reference's process: must not import descant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.unit.decoding.processors.prefixes import allowed_after


def allowed_by_any(
    salts: Sequence[int], vocabulary: int, always: Sequence[int] = ()
) -> Callable[[int, torch.Tensor], list[int]]:
    """A prefix function that allows what one of several allows, and some tokens always."""
    some = [allowed_after(salt, vocabulary) for salt in salts]
    return lambda batch, ids: sorted(set(always).union(*(one(batch, ids) for one in some)))


def verdict(kind: str, *given: int) -> Callable[..., Any]:
    """A stopping criterion: one answer for all rows, as a bool or a tensor, or one for each row."""

    def long_enough(input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return bool(input_ids.shape[1] >= given[0])

    def all_alike(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor(input_ids.shape[1] >= given[0])

    def row_by_row(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        # Not by the last token alone, so that it is no end token in disguise.
        return (input_ids[:, -1] * given[1] + input_ids[:, -2]) % given[0] == 0

    return {"bool": long_enough, "scalar": all_alike, "rows": row_by_row}[kind]
