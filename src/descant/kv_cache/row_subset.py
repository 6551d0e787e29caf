"""Some rows of a cache, in an order of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from descant.core.interfaces import Cache, KeyCache, Reach, Span, StateCache

__all__ = ["Portion", "portion"]


def portion(cache: Cache, place: Tensor) -> Cache:
    """A cache whose row `i` is row `place[i]` (host) of the given one, which it is if they lie like that."""
    # Where rows have twins beside them, the cache inside is the one that is written.
    while (inner := getattr(cache, "inner", None)) is not None:
        place, cache = cast(Any, cache).place[place], inner
    if len(place) == len(cache) and torch.equal(place, torch.arange(len(place))):
        return cache
    return Portion(cache, place)


class Portion:
    """A cache as a model sees it that is fed only some of its rows, or all of them in another order.

    It reads and writes what the whole holds, for the time of one forward; rows are moved in the whole.
    """

    def __init__(self, whole: Cache, place: Tensor) -> None:
        self._whole = whole
        self._place = place  # [N] (host)
        self._spans: tuple[Span, Span] | None = None  # the last one, as given and as the whole has it

    @property
    def rewind(self) -> int | None:
        """How far rows may be cut."""
        return self._whole.rewind

    def __len__(self) -> int:
        return len(self._place)

    @cached_property
    def parts(self) -> Sequence[Cache]:
        """The same of each part, where the whole is the caches of several models."""
        return [portion(part, self._place) for part in cast(Any, self._whole).parts]

    def commit(self, parents: Tensor | None, lengths: Tensor) -> NoReturn:  # noqa: ARG002 - the port
        """Not here: the rows of a portion lie between others."""
        raise TypeError("rows of a portion move with the whole: commit there")

    def extend(self, rows: int) -> NoReturn:  # noqa: ARG002 - the port
        """Not here: the rows of a portion lie between others."""
        raise TypeError("rows of a portion are some of the whole: extend that")

    # -------------------------------------------------------------------- keys and values
    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; the keys and values [N, H, S, D] that its rows hold then."""
        return cast(KeyCache, self._whole).update(layer, key, value, self._inside(span))

    def reach(self, layer: int, span: Span) -> Reach | None:
        """What `update` is about to show of that layer."""
        return cast(KeyCache, self._whole).reach(layer, self._inside(span))

    def _inside(self, span: Span) -> Span:
        """A span as the whole has it: one for all layers, for a cache may look up once what it comes to."""
        if self._spans is None or self._spans[0] is not span:
            whence = span.on_host(len(self))[0]
            places = self._place[whence]
            rows = places if span.rows is None else places.to(span.rows.device, non_blocking=True)
            self._spans = span, span._replace(rows=rows, places=places)
        return self._spans[1]

    # -------------------------------------------------------------------- state
    def together(self) -> list[Tensor]:
        """The rows that have a state, in as few parts as can share a forward (host)."""
        whose = torch.full((len(self._whole),), -1)
        whose[self._place] = torch.arange(len(self._place))
        mine = [whose[part] for part in cast(StateCache, self._whole).together()]
        return [part[part >= 0].sort().values for part in mine if bool((part >= 0).any())]

    def fetch(self, rows: Tensor) -> Any:
        """The state of those rows (host), a line each, in that order; it may be written to."""
        return cast(StateCache, self._whole).fetch(self._place[rows])

    def keep(self, rows: Tensor, state: Any) -> None:
        """Hold the state of those rows (host) after a forward."""
        cast(StateCache, self._whole).keep(self._place[rows], state)
