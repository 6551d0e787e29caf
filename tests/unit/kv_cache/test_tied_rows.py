"""Rows that share a row of a cache read what a list of lists per sequence holds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.core.interfaces import KVSpan
from descant.kv_cache.row_views import TiedRowCache
from descant.kv_cache.stores.dense import DenseStore


class _Sequences:
    """The cache, and lists of the positions that each sequence has written, with and without condition."""

    def __init__(self, rows: int) -> None:
        self.cache = TiedRowCache(DenseStore())
        self.rows = rows
        self.order: list[tuple[int, int]] = []  # (sequence, codebook) of each row
        self.written: dict[tuple[int, bool], list[float]] = {}
        self.prefix: dict[int, int] = {}
        self.next = 0

    def add(self, prefix: int, is_guided: bool) -> None:
        first = len(self.order)
        self.cache.extend(self.rows)
        assert self.cache.untied == list(range(first, first + self.rows))
        self.cache.tie(self.cache.untied, prefix, is_guided)
        self.order += [(self.next, codebook) for codebook in range(self.rows)]
        self.prefix[self.next] = prefix
        self.written |= {(self.next, False): []} | ({(self.next, True): []} if is_guided else {})
        self.next += 1

    def network_rows(self) -> list[tuple[int, bool]]:
        """The sequence of each inner row."""
        found: dict[int, tuple[int, bool]] = {}
        for row, (sequence, _) in enumerate(self.order):
            found[int(self.cache.row_index[row])] = sequence, False
            if int(self.cache.uncond_index[row]) >= 0:
                found[int(self.cache.uncond_index[row])] = sequence, True
        assert sorted(found) == list(range(len(found)))
        return [found[row] for row in range(len(found))]

    def step(self) -> None:
        """Write one position of each sequence, those of its prefix before its first, and commit."""
        for row, key in enumerate(self.network_rows()):
            size = 1 if self.written[key] else 1 + self.prefix[key[0]]
            start = len(self.written[key])
            values = [1000.0 * key[0] + 500.0 * key[1] + start + place for place in range(size)]
            block = torch.tensor(values)[None, None, :, None]
            span = KVSpan(torch.tensor([row]), start, size, start + size, torch.tensor([row]))
            self.cache.inner.update(0, block, -block, span)
            self.written[key] += values
        self.cache.commit(None, self.lengths())

    def lengths(self) -> torch.Tensor:
        """The positions of each row, without its prefix."""
        return torch.tensor(
            [
                max(0, len(self.written[sequence, False]) - self.prefix[sequence])
                for sequence, _ in self.order
            ],
            dtype=torch.long,
        )

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows in this order."""
        lengths = self.lengths()[rows]
        self.order = [self.order[row] for row in rows]
        self.cache.commit(torch.tensor(rows, dtype=torch.long), lengths)

    def check(self) -> None:
        inner = self.cache.inner
        assert isinstance(inner, DenseStore)
        keys = self.network_rows()
        assert len(inner) == len(keys)
        assert len(self.cache) == len(self.order)
        for row, key in enumerate(keys):
            if self.written[key]:
                stored = inner.read(0, torch.tensor([row]))[0][0, 0, : len(self.written[key]), 0]
                assert stored.tolist() == self.written[key]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tied_rows_equal_lists(data: st.DataObject) -> None:
    sequences = _Sequences(data.draw(st.integers(1, 3)))
    sequences.add(data.draw(st.integers(0, 2)), data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 7))):
        action = data.draw(st.sampled_from(["add", "step", "keep"]))
        if action == "add":
            sequences.add(data.draw(st.integers(0, 2)), data.draw(st.booleans()))
        elif action == "step":
            sequences.step()
        else:
            everything = data.draw(st.permutations(range(len(sequences.order))))
            sequences.keep(everything[: data.draw(st.integers(0, len(everything)))])
        sequences.check()


def test_an_inner_row_is_freed_with_the_last_of_its_rows() -> None:
    sequences = _Sequences(2)
    sequences.add(0, True)
    sequences.add(0, False)
    sequences.step()
    assert len(sequences.cache.inner) == 3
    sequences.keep([1, 2, 3])
    assert len(sequences.cache.inner) == 3
    sequences.keep([1, 2])
    assert len(sequences.cache.inner) == 1
    sequences.check()


def test_limits_are_those_of_the_inner_cache() -> None:
    inner = DenseStore()
    cache = TiedRowCache(inner)
    assert (cache.max_rewind, cache.capacity) == (inner.max_rewind, inner.capacity)
