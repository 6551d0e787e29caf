"""`use_cache=False`: every step feeds whole rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.kv_cache.stores.block_store import Store


class NoCache(Store):
    """A cache that stores nothing; a write returns its own keys and values."""

    nbytes = 0
    grows = False

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """Set the number of rows, which have no positions."""
        del parents
        self._lengths = torch.zeros_like(lengths)

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The keys and values just written, which are complete: every row is fed from its start."""
        return key, value

    # -------------------------------------------------------------------- state
    def state_lengths(self, lengths: Tensor) -> Tensor:
        """0 for each row."""
        return torch.zeros_like(lengths)

    def row_batches(self, lengths: Tensor | None = None) -> list[Tensor]:  # noqa: ARG002 - the interface
        """Empty: no row has a state."""
        return []

    def write_state(self, rows: Tensor, state: Any, lengths: Tensor | None = None) -> None:
        """Discard the state."""


class RecomputeModel:
    """Wraps a model so that every step feeds rows from their start."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, rows: Rows, proposal: Proposal, cache: Any, **options: Any) -> ForwardOutput:
        """Forward of whole rows."""
        uncached = rows.replace(cached_length=torch.zeros_like(rows.cached_length))
        output: ForwardOutput = self.inner.forward(uncached, proposal, cache, **options)
        return output
