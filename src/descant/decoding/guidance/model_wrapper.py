"""A model around another: what every wrapper hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import ModelTraits, RowCache
from descant.core.rows import Rows

__all__ = ["ModelWrapper"]


class ModelWrapper:
    """Answers for the model inside, in everything that a wrapper does not change."""

    required_states: tuple[str, ...] = ()  # what it needs of each forward besides logits
    row_flag: str = ""  # the parameter that rows have which ask for it, where a recipe made it
    _active_rows: tuple[object, Tensor] | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def traits(self) -> ModelTraits:
        """Those of the model inside."""
        facts: ModelTraits = self.inner.traits
        return facts

    @property
    def device(self) -> torch.device:
        """Where it takes its inputs."""
        device: torch.device = self.inner.device
        return device

    def active_rows(self, rows: Rows) -> Tensor:
        """The rows that ask for it [N] (host)."""
        if self._active_rows is None or self._active_rows[0] != rows.version:
            told = row_params(rows).values.get(self.row_flag)
            asks = torch.zeros(len(rows)) if not isinstance(told, Tensor) else told
            self._active_rows = (rows.version, (asks == 1).nonzero().squeeze(1))
        return self._active_rows[1]

    def set_output_states(self, states: Sequence[str]) -> None:
        """Bring these states along from the next forward on."""
        self.inner.set_output_states(states)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Hand the inputs of new requests on."""
        self.inner.add_requests(requests, inputs)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self.inner.remove_requests(requests)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache as it is."""
        return cache
