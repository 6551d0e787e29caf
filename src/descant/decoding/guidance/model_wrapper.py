"""The base class of model wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.core.context import row_params
from descant.core.interfaces import ModelTraits, RankGroup, RowCache
from descant.core.rows import Rows

__all__ = ["ModelWrapper"]


class ModelWrapper:
    """A model around an inner model; everything a subclass does not override is passed through."""

    required_states: tuple[str, ...] = ()  # outputs it needs from each forward besides logits
    row_flag: str = ""  # row parameter that enables it, for wrappers made by recipes
    _active_rows: tuple[object, Tensor] | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def traits(self) -> ModelTraits:
        """The inner model's traits."""
        traits: ModelTraits = self.inner.traits
        return traits

    @property
    def network(self) -> Any:
        """That of the model inside."""
        return self.inner.network

    @property
    def rank_group(self) -> RankGroup | None:
        """That of the model inside."""
        group: RankGroup | None = self.inner.rank_group
        return group

    def new_cache(self) -> RowCache:
        """An empty cache for the model inside."""
        cache: RowCache = self.inner.new_cache()
        return cache

    @property
    def device(self) -> torch.device:
        """The inner model's input device."""
        device: torch.device = self.inner.device
        return device

    def active_rows(self, rows: Rows) -> Tensor:
        """The rows that enable this wrapper [N] (host)."""
        if self._active_rows is None or self._active_rows[0] != rows.version:
            column = row_params(rows).values.get(self.row_flag)
            flags = torch.zeros(len(rows)) if not isinstance(column, Tensor) else column
            self._active_rows = (rows.version, (flags == 1).nonzero().squeeze(1))
        return self._active_rows[1]

    def set_output_states(self, states: Sequence[str]) -> None:
        """Return these states from the next forward on."""
        self.inner.set_output_states(states)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Pass the inputs of new requests to the inner model."""
        self.inner.add_requests(requests, inputs)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Remove requests."""
        self.inner.remove_requests(requests)

    def wrap_cache(self, cache: RowCache) -> RowCache:
        """The cache this wrapper needs around the inner cache: unchanged by default."""
        return cache
