"""No cache at all: every step reads everything again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import Span
from descant.core.records import Output, Proposal
from descant.core.rows import Rows

__all__ = ["Rereading", "Unkept"]


class Unkept:
    """A cache that keeps nothing: what is written is shown to the layer that wrote it, and gone."""

    rewind: int | None = None
    nbytes = 0

    def __init__(self) -> None:
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def lengths(self) -> Tensor:
        """Nothing is held [R] (host)."""
        return torch.zeros(self._rows, dtype=torch.long)

    def extend(self, rows: int) -> None:
        """Append rows."""
        self._rows += rows

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """As many rows as there are now."""
        del parents
        self._rows = len(lengths)

    def reach(self, layer: int, span: Span) -> None:
        """Slot `p` is position `p`."""

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """What was written, which is all there is: every row is fed from its beginning."""
        return key, value

    # -------------------------------------------------------------------- state
    def together(self) -> list[Tensor]:
        """No row has a state."""
        return []

    def keep(self, rows: Tensor, state: Any) -> None:
        """The state after a forward is not held."""


class Rereading:
    """A model whose rows are fed from their beginning in every step, as if none of it were cached."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, rows: Rows, proposal: Proposal, cache: Any, **how: Any) -> Output:
        """What the model says of rows that it reads as a whole."""
        whole = rows.changed(cached=torch.zeros_like(rows.cached))
        output: Output = self.inner.forward(whole, proposal, cache, **how)
        return output
