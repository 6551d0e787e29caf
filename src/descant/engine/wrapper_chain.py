"""The model of a table with the wrappers that its requests need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from descant.core.interfaces import Model, RowCache, Wrapper
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.engine.planner import WRAPPERS, DecodingPlan
from descant.kv_cache.row_subset import row_subset

__all__ = ["WrapperChain"]

WrapperFactory = Callable[[Any], Any]


class WrapperChain:
    """A base model and the wrappers around it, each once and in order, recipes' outermost."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.model: Any = base  # the outermost wrapper, or the base
        self.wrappers: Mapping[str, Wrapper] = {}  # by name, innermost first
        self._factories: Mapping[str, WrapperFactory] = {name: spec.make for name, spec in WRAPPERS.items()}
        self._cache_wrappers: set[str] = set()  # names of the wrappers that wrap the cache

    def model_for(self, names: Collection[str]) -> Any:
        """The model of rows that use only these wrappers: others are not run, where the cache allows it."""
        if not names:
            return _UnwrappedModel(self.base) if self._cache_wrappers & self.wrappers.keys() else self.base
        model = self.model
        for name, wrapper in reversed(list(self.wrappers.items())):
            if name in names or name in self._cache_wrappers:
                break
            model = wrapper.inner
        return model

    def remove_request(self, number: int, names: Collection[str]) -> None:
        """Remove a request from all models; a wrapper that raises fails only requests that use it."""
        try:
            self.model.remove_requests([number])
        except Exception:
            used = [wrapper for name, wrapper in self.wrappers.items() if name in names]
            own = used[-1] if used else self.base
            if own is self.model:
                raise
            own.remove_requests([number])

    def new_cache(self) -> RowCache:
        """An empty cache as the wrappers need it."""
        cache: RowCache = self.base.new_cache()
        for wrapper in self.wrappers.values():
            cache = wrapper.wrap_cache(cache)
        return cache

    def add(self, plans: Sequence[DecodingPlan], cache: RowCache, undo: ExitStack) -> RowCache:
        """Add the wrappers that these plans need; the cache as they need it. `undo` removes them again."""
        names = {name for one in plans for name in one.wrappers}
        if names <= self.wrappers.keys():
            return cache
        factories = dict(self._factories)
        for one in plans:
            if one.recipe is not None and one.recipe.kind == "wrapper":
                factories.setdefault(one.recipe.row_flag, one.recipe.build)
        # A constructor may raise anything, so the chain changes only once all wrappers are built.
        wrappers: dict[str, Wrapper] = {}
        inner = self.base
        for name, build in factories.items():
            if name in self.wrappers:
                wrappers[name] = inner = self.wrappers[name]
            elif name in names:
                wrapper = build(inner)
                wrapper.row_flag = name
                wrapped = wrapper.wrap_cache(cache)
                if wrapped is not cache:
                    self._cache_wrappers.add(name)
                cache = wrapped
                wrappers[name] = inner = wrapper
        undo.callback(self._link, self.wrappers, self._factories)
        self._link(wrappers, factories)
        return cache

    def _link(self, wrappers: Mapping[str, Wrapper], factories: Mapping[str, WrapperFactory]) -> None:
        """Put these wrappers around the base model, each around the one before it."""
        inner = self.base
        for wrapper in wrappers.values():
            wrapper.inner = inner
            inner = wrapper
        self.wrappers, self._factories, self.model = wrappers, factories, inner


class _UnwrappedModel:
    """A base model on the cache of wrappers that none of the rows uses."""

    def __init__(self, base: Model) -> None:
        self._base = base

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Feed the rows to the base model."""
        return self._base.forward(rows, proposal, row_subset(cache, torch.arange(len(rows))))
