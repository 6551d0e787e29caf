"""The model of a table with the wrappers that its requests need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from descant.core.interfaces import RowCache, Wrapper
from descant.engine.planner import WRAPPERS, DecodingPlan

__all__ = ["WrapperChain"]

WrapperFactory = Callable[[Any], Any]


class WrapperChain:
    """A base model and the wrappers around it, each once and in order, recipes' outermost."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.model: Any = base  # the outermost wrapper, or the base
        self.wrappers: Mapping[str, Wrapper] = {}  # by name, innermost first
        self._factories: Mapping[str, WrapperFactory] = {name: spec.make for name, spec in WRAPPERS.items()}

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
                cache = wrapper.wrap_cache(cache)
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
