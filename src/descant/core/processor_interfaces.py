"""The interfaces of logits processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from descant.core.context import Context
from descant.core.rows import Column

__all__ = ["Processor", "StateValue", "StatefulProcessor"]

# The initial value of a state column: a number, a tensor [1, ...] or a Column of one row.
StateValue = float | Tensor | Column


class Processor(Protocol):
    """Changes logits. It is pure: its state, if any, lives in columns of the table."""

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V] for the lines of `context`."""
        ...


class StatefulProcessor(Processor, Protocol):
    """A processor that depends on more of a row's past than its tokens."""

    @property
    def state(self) -> Mapping[str, StateValue]:
        """Its columns by name, each with the value of a new row; empty: it has no state."""
        ...

    def advance(
        self, context: Context, before: Tensor, after: Tensor, tokens: Tensor
    ) -> Mapping[str, Tensor | Column]:
        """The state of each line [N] after its token [N], given its scores before and after [N, V]."""
        ...
