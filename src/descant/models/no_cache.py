"""No cache at all: every step reads everything again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows

__all__ = ["NoCache", "RecomputeModel"]


class NoCache:
    """A cache that keeps nothing: what is written is shown to the layer that wrote it, and gone."""

    max_rewind: int | None = None
    nbytes = 0

    def __init__(self) -> None:
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def lengths(self) -> Tensor:
        """Nothing is held [R] (host)."""
        return torch.zeros(self._num_rows, dtype=torch.long)

    def extend(self, rows: int) -> None:
        """Append rows."""
        self._num_rows += rows

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """As many rows as there are now."""
        del parents
        self._num_rows = len(lengths)

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        """Slot `p` is position `p`."""

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """What was written, which is all there is: every row is fed from its beginning."""
        return key, value

    # -------------------------------------------------------------------- state
    def row_batches(self) -> list[Tensor]:
        """No row has a state."""
        return []

    def write_state(self, rows: Tensor, state: Any) -> None:
        """The state after a forward is not held."""


class RecomputeModel:
    """A model whose rows are fed from their beginning in every step, as if none of it were cached."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, rows: Rows, proposal: Proposal, cache: Any, **how: Any) -> ForwardOutput:
        """What the model says of rows that it reads as a whole."""
        whole = rows.replace(cached_length=torch.zeros_like(rows.cached_length))
        output: ForwardOutput = self.inner.forward(whole, proposal, cache, **how)
        return output
