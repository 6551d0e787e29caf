"""Blocks of the paged cache: rows are admitted, fork, finish or are dropped; none is leaked or freed twice.

CI goes through the first of 10,000 schedules; `pytest tests/contracts/test_blocks.py -m ""` goes through all.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from descant.core.interfaces import KVSpan
from descant.kv_cache.stores.paged import PagedStore
from tests.contracts.stores import small
from tests.support.block_pool import check_ref_counts, num_used_blocks

PART, WHOLE, SLICE = 500, 10_000, 500
PARTS = [
    pytest.param(first, marks=() if first < SLICE else pytest.mark.slow, id=f"{first}-{first + PART - 1}")
    for first in range(0, WHOLE, PART)
]


class Server:
    """A table of requests and stored prompts, with random operations."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = PagedStore(block_size=self.rng.choice((1, 2, 4, 16)))
        self.owner: list[int] = []  # [R] the request of each row
        self.kept: list[PagedStore] = []
        self._requests = 0

    def run(self, steps: int) -> None:
        """Random operations, then everything leaves; the reference counts are always right."""
        deeds = (self.admit, self.admit, self.step, self.step, self.step, self.step, self.cancel, self.keep)
        for _ in range(steps):
            self.rng.choice((*deeds, self.recall, self.forget, self.fail, self.evict))()
            self.check()
        while self.kept:
            self.forget()
            self.check()
        self.evict()
        self.check()
        assert num_used_blocks(self.store.pool) == 0
        assert set(self.store.pool.slabs) == {0}, "an arena of a prompt is left"

    def check(self) -> None:
        """Reference counts match the block tables, and no table holds more than it needs."""
        tables = [self.store, *(one for one in self.kept if one.pool is self.store.pool)]
        check_ref_counts(self.store.pool, *tables)
        named = np.concatenate([one.referenced_blocks() for one in tables])
        assert num_used_blocks(self.store.pool) == len(set(named.tolist()))
        size = self.store.pool.block_size
        for one in self.kept:
            assert len(one.referenced_blocks()) == sum(-(-length // size) for length in one.lengths.tolist())

    # -------------------------------------------------------------------- what happens
    def admit(self) -> None:
        """A request comes, with a prompt that is read at once, or is read together with the others'."""
        if len(self.owner) > 12:
            return
        self.store.extend(1)
        self.owner.append(self._requests)
        self._requests += 1
        if self.rng.random() < 0.7:
            self.write([len(self.owner) - 1], self.rng.choice((1, 3, 17, 70)))
            self.commit(None)

    def step(self) -> None:
        """Some rows are fed, all of them ragged or some, and then each request picks among its rows."""
        rows = [row for row in range(len(self.owner)) if self.rng.random() < 0.8]
        if rows:
            self.write(rows, self.rng.choice((1, 1, 2, 5)))
        parents: list[int] = []
        for request in sorted(set(self.owner)):
            mine = [row for row, owner in enumerate(self.owner) if owner == request]
            parents += self.rng.choices(mine, k=self.rng.choice((1, len(mine), 3)))
        if self.rng.random() < 0.5:
            self.rng.shuffle(parents)
        self.commit(parents if self.rng.random() < 0.7 else None)

    def cancel(self) -> None:
        """A request leaves, whatever was written for it."""
        if self.owner:
            gone = self.rng.choice(self.owner)
            self.commit([row for row, owner in enumerate(self.owner) if owner != gone])

    def fail(self) -> None:
        """A forward writes without a commit."""
        if self.owner:
            self.write([self.rng.randrange(len(self.owner))], 4)

    def keep(self) -> None:
        """Rows are kept as a prompt for others."""
        if self.owner and len(self.kept) < 4:
            rows = self.rng.choices(range(len(self.owner)), k=2)
            self.kept.append(self.store.select(torch.tensor(rows)))

    def recall(self) -> None:
        """A request comes that begins with what is kept, here or in a pool of its own."""
        if not self.kept or len(self.owner) > 12:
            return
        rows = torch.tensor([0] * self.rng.choice((1, 3)))
        past = self.rng.choice(self.kept).select(rows)
        if self.rng.random() < 0.3:
            elsewhere = PagedStore(self.store.pool.block_size)
            elsewhere.load(past.state())
            past = elsewhere
        self.store.join(past)
        self.owner += [self._requests] * len(rows)
        self._requests += 1

    def forget(self) -> None:
        """Something that was kept goes."""
        if self.kept:
            del self.kept[self.rng.randrange(len(self.kept))]

    def evict(self) -> None:
        """Everything goes."""
        self.commit([])

    # -------------------------------------------------------------------- how
    def write(self, rows: list[int], width: int) -> None:
        starts = self.store.lengths[rows]
        level = bool((starts == starts[0]).all())
        start = int(starts[0]) if level else starts
        self._written = {row: int(begin) + width for row, begin in zip(rows, starts.tolist(), strict=True)}
        span = KVSpan(torch.tensor(rows), start, width, int(starts.max()) + width)
        content = torch.zeros(len(rows), 1, width, 1)
        self.store.update(0, content, content, span)

    def commit(self, parents: list[int] | None) -> None:
        held = [
            self._written.get(row, length) if self.rng.random() < 0.8 else length
            for row, length in enumerate(self.store.lengths.tolist())
        ]
        whence = range(len(held)) if parents is None else parents
        lengths = [held[row] - (self.rng.randrange(3) if self.rng.random() < 0.2 else 0) for row in whence]
        index = None if parents is None else torch.tensor(parents, dtype=torch.long)
        self.store.commit(index, torch.tensor([max(one, 0) for one in lengths], dtype=torch.long))
        self.owner = [self.owner[row] for row in whence]
        self._written = {}

    _written: dict[int, int] = {}  # noqa: RUF012 - replaced, never written to


def schedules(first: int, count: int) -> None:
    with small():
        for seed in range(first, first + count):
            try:
                Server(seed).run(16)
            except Exception as error:
                raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize("first", PARTS)
def test_no_block_is_leaked_or_freed_twice(first):
    schedules(first, PART)
