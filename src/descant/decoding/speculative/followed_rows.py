"""Which rows a drafter follows, also when a step is repeated."""

from __future__ import annotations

import torch

from descant.core.interfaces import Array, Drafter
from descant.core.rows import Rows

__all__ = ["FollowedRows"]


class FollowedRows:
    """The rows of the last draft, by request and slot, with their lengths.

    A row that still has the length of the last draft was in a step that did not end. Then all rows are where
    the drafter was last told, and not where the last completed step left them.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}  # index and length

    def commit(self, drafter: Drafter, rows: Rows, draft_row: Array) -> None:
        """Have a drafter follow rows, which were rows `draft_row` [R] at the last draft that was used."""
        keys = list(zip(rows.request.tolist(), rows.slot.tolist(), strict=True))
        lengths, last = rows.length.tolist(), self._last
        # A request that took no part in the last draft was preempted since, and is new to the drafter.
        drafted = {request for request, _ in last}
        was_drafted = torch.tensor([request in drafted for request, _ in keys])
        parents = torch.where(was_drafted, torch.from_numpy(draft_row), -1)
        if any(last.get(key, (0, -1))[1] == length for key, length in zip(keys, lengths, strict=True)):
            parents = torch.tensor([last.get(key, (-1, 0))[0] for key in keys], dtype=torch.long)
        drafter.commit(parents, rows.length)
        self._last = {key: (row, length) for row, (key, length) in enumerate(zip(keys, lengths, strict=True))}
