"""A model around another: what every wrapper hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.core.context import params_of
from descant.core.interfaces import Cache, Facts
from descant.core.rows import Rows

__all__ = ["Wrapped"]


class Wrapped:
    """Answers for the model inside, in everything that a wrapper does not change."""

    states: tuple[str, ...] = ()  # what it needs of each forward besides logits
    mark: str = ""  # the parameter that rows have which ask for it, where a recipe made it
    _asking: tuple[object, Tensor] | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def facts(self) -> Facts:
        """Those of the model inside."""
        facts: Facts = self.inner.facts
        return facts

    @property
    def device(self) -> torch.device:
        """Where it takes its inputs."""
        device: torch.device = self.inner.device
        return device

    def mine(self, rows: Rows) -> Tensor:
        """The rows that ask for it [N] (host)."""
        if self._asking is None or self._asking[0] != rows.version:
            told = params_of(rows).values.get(self.mark)
            asks = torch.zeros(len(rows)) if not isinstance(told, Tensor) else told
            self._asking = (rows.version, (asks == 1).nonzero().squeeze(1))
        return self._asking[1]

    def show(self, states: Sequence[str]) -> None:
        """Bring these states along from the next forward on."""
        self.inner.show(states)

    def open(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Hand the inputs of new requests on."""
        self.inner.open(requests, inputs)

    def close(self, requests: Sequence[int]) -> None:
        """Forget those requests."""
        self.inner.close(requests)

    def around(self, cache: Cache) -> Cache:
        """The cache as it is."""
        return cache
