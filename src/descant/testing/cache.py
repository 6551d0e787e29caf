"""The law of caches: each equals the obvious one, a list of positions for every row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from descant.errors import MissingExtra
from descant.ports import KeyCache, Span
from descant.session import Request
from descant.testing.outcome import TOLERANCE, compare, outcomes
from descant.testing.schedule import Schedule

__all__ = ["ListCache", "check_cache", "check_generation"]

Entry = tuple[Tensor, Tensor]  # key and value of one position, [H, D] each


class ListCache:
    """The cache that is obviously right, and slow: of every row, for every layer, a list of positions."""

    rewind: int | None = None

    def __init__(self) -> None:
        self._rows: list[dict[int, list[Entry]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, rows: int) -> None:
        """Append empty rows."""
        self._rows += [{} for _ in range(rows)]

    def update(self, layer: int, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [N, H, T, D] at the span; what its rows hold then [N, H, S, D], else zeros."""
        places = list(range(len(self._rows))) if span.rows is None else span.rows.tolist()
        starts = [span.start] * len(places) if isinstance(span.start, int) else span.start.tolist()
        keys = key.new_zeros(len(places), key.shape[1], span.stop, key.shape[3])
        values = value.new_zeros(len(places), value.shape[1], span.stop, value.shape[3])
        for line, (place, start) in enumerate(zip(places, starts, strict=True)):
            held = self._rows[place].setdefault(layer, [])
            if start > len(held):
                raise AssertionError(f"row {place} holds {len(held)} positions, {start} is written: a gap")
            held[start:] = [
                (key[line, :, at].clone(), value[line, :, at].clone()) for at in range(span.width)
            ]
            for at, (one, two) in enumerate(held):
                keys[line, :, at], values[line, :, at] = one, two
        return keys, values

    def commit(self, parents: Tensor | None, lengths: Tensor) -> None:
        """New row `i` is old row `parents[i]` (None: `i`) cut to `lengths[i]`."""
        whence = range(len(self._rows)) if parents is None else parents.tolist()
        self._rows = [
            {layer: held[:length] for layer, held in self._rows[parent].items()}
            for parent, length in zip(whence, lengths.tolist(), strict=True)
        ]


class _Trial:
    """A cache and a ListCache that are told the same things, chosen by `data`."""

    layers, heads, size = 2, 2, 3

    def __init__(self, cache: KeyCache, data: Any, strategies: Any) -> None:
        self._cache, self._list = cache, ListCache()
        self._data, self._st = data, strategies
        self._lengths: list[int] = []
        self._written = 0
        self._log: list[str] = []

    def run(self) -> None:
        """Some operations, and a look at everything after the last."""
        try:
            self._operate()
        except Exception as error:
            what = error if isinstance(error, AssertionError) else f"{type(error).__name__}, {error}"
            told = "\n  ".join(self._log)
            raise AssertionError(f"{type(self._cache).__name__}: {what}, after\n  {told}") from error

    def _operate(self) -> None:
        self._extend()
        for _ in range(self._int(1, 8)):
            if not self._lengths or self._int(0, 4) == 0:
                self._extend()
            if self._int(0, 4) == 0:
                self._commit(self._lengths)  # a request is cancelled between two steps
            if self._lengths:
                self._write()
        if self._lengths:
            self._update(list(range(len(self._lengths))), 1)

    def _int(self, low: int, high: int) -> int:
        return int(self._data.draw(self._st.integers(low, high)))

    def _extend(self) -> None:
        count = self._int(1, 3)
        self._log.append(f"extend({count})")
        for cache in (self._cache, self._list):
            cache.extend(count)
        self._lengths += [0] * count

    def _write(self) -> None:
        """What a step does: some forwards over disjoint rows, then a commit."""
        rows = list(range(len(self._lengths)))
        held = list(self._lengths)
        # One forward for all rows, or up to three for parts of them; what is in part 0 is not fed.
        split = self._int(0, 1)
        parts = [self._int(0, 3) if split else 1 for _ in rows]
        for part in (1, 2, 3):
            fed = [row for row in rows if parts[row] == part]
            if fed:
                width = self._int(1, 4)
                self._update(fed, width)
                for row in fed:
                    held[row] += width
        self._commit(held)

    def _update(self, rows: Sequence[int], width: int) -> None:
        starts = [self._lengths[row] for row in rows]
        level = len(set(starts)) == 1
        whole = len(rows) == len(self._lengths)
        start = starts[0] if level else torch.tensor(starts)
        span = Span(None if whole else torch.tensor(rows), start, width, max(starts) + width)
        self._log.append(f"update(rows={list(rows)}, start={starts}, width={width})")
        for layer in range(self.layers):
            key = self._fresh(len(rows), width)
            got = self._cache.update(layer, key, -key, span)
            expected = self._list.update(layer, key, -key, span)
            self._compare(rows, starts, width, layer, (got, expected))

    def _fresh(self, rows: int, width: int) -> Tensor:
        """Numbers that were never written before [N, H, T, D]."""
        count = rows * self.heads * width * self.size
        self._written += count
        new = torch.arange(self._written - count + 1, self._written + 1).float()
        return new.view(rows, self.heads, width, self.size)

    def _compare(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        width: int,
        layer: int,
        pair: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        for name, got, expected in zip(("keys", "values"), *pair, strict=True):
            if got.shape[:2] != expected.shape[:2] or got.shape[3] != expected.shape[3]:
                self._fail(f"{name} are {list(got.shape)}, must be {list(expected.shape)}")
            for line, (row, start) in enumerate(zip(rows, starts, strict=True)):
                if not torch.equal(got[line, :, : start + width], expected[line, :, : start + width]):
                    wrong = got[line, :, : start + width] != expected[line, :, : start + width]
                    at = wrong.any(-1).any(0).nonzero().flatten().tolist()
                    self._fail(f"{name} of row {row}, layer {layer}, are wrong at positions {at}")

    def _commit(self, held: Sequence[int]) -> None:
        """Reorder, fork, drop and cut, or only cut, or nothing."""
        rows = len(held)
        parents = list(range(rows))
        moves = bool(self._int(0, 1))
        if moves:
            parents = [self._int(0, rows - 1) for _ in range(self._int(0, rows + 2))]
        cuts = bool(self._int(0, 1))
        back = self._cache.rewind
        lengths = [
            self._int(max(0, held[row] - back) if back is not None else 0, held[row]) if cuts else held[row]
            for row in parents
        ]
        self._log.append(f"commit({parents if moves else None}, {lengths})")
        for cache in (self._cache, self._list):
            whence = torch.tensor(parents, dtype=torch.long) if moves else None
            cache.commit(whence, torch.tensor(lengths, dtype=torch.long))
        self._lengths = lengths

    def _fail(self, what: str) -> None:
        raise AssertionError(what)


def check_cache(make_cache: Callable[[], KeyCache], examples: int = 200) -> None:
    """Any sequence of operations leaves every row's keys and values equal to ListCache's.

    The operations are those of the loop: empty rows are appended; forwards write to all or some rows,
    level or ragged; a commit reorders, forks, drops and cuts. A failure is shrunk to the shortest.
    """
    try:
        from hypothesis import HealthCheck, given, settings, strategies
    except ImportError:
        raise MissingExtra("testing", "check_cache") from None

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.data())
    def holds(data: Any) -> None:
        _Trial(make_cache(), data, strategies).run()

    holds()


def check_generation(
    make_cache: Callable[[], KeyCache],
    model: Any,
    requests: Sequence[Request],
    schedules: int = 3,
    tolerance: float = TOLERANCE,
) -> None:
    """Whole generations on the cache equal those on a ListCache: admitted at once, and by chance."""
    rng = random.Random(len(requests))
    count = len(requests)
    plans = [Schedule.at_once(range(count))]
    plans += [Schedule.chance(rng, count + 1, cancelled=[count]) for _ in range(schedules)]
    for number, schedule in enumerate(plans):
        whole = [*requests, requests[number % count]]
        expected = outcomes(model, whole, schedule, ListCache())
        found = outcomes(model, whole, schedule, make_cache())
        for place in range(count):
            where = f"request {place} in schedule {number}, against a ListCache"
            compare(expected[place], found[place], where, tolerance)
