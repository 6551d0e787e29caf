"""A cache with eviction by a rule, compared with complete lists read by the same rule."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descant.core.interfaces import KVSpan

HEADS, SIZE = 2, 4


class Lists:
    """Of every row, for every layer, all positions [H, D] that it ever had."""

    def __init__(self, layers):
        self.layers, self.rows = layers, []

    def extend(self, rows):
        self.rows += [[[] for _ in range(self.layers)] for _ in range(rows)]

    def write(self, layer, row, start, new):
        """Positions [H, T, D] from `start` on."""
        held = self.rows[row][layer]
        assert start <= len(held)
        held[start:] = list(new.unbind(1))

    def commit(self, parents, lengths):
        self.rows = [
            [held[:length] for held in self.rows[parent]]
            for parent, length in zip(parents, lengths, strict=True)
        ]


class Drill:
    """Operations drawn by `chance`, on a store and on lists; `rule` says which positions a row shows.

    `rule(layer, start)` gives the positions that are shown before the fed one `start`, and by how much each
    key is moved on; `moved(key, count)` moves a key [H, D] on.
    """

    def __init__(self, make, layers, chance, rule, moved=None):
        self.store, self.make, self.layers = make(), make, layers
        self.lists, self.int, self.rule, self.moved = Lists(layers), chance.randint, rule, moved
        self.lengths, self.high, self.count = [], [], 0
        self.certain = []  # committed length of each row, which cannot be cut

    def run(self, steps):
        self.extend()
        for _ in range(steps):
            kind = self.int(0, 9)
            if kind == 0 or not self.lengths:
                self.extend()
            elif kind == 1:
                self.commit(list(self.lengths))
            elif kind == 2:
                self.part()
            elif kind == 3:
                self.reload()
            if self.lengths:
                self.step()
        if self.lengths:
            self.feed(range(len(self.lengths)), list(self.lengths), 1)

    def extend(self):
        count = self.int(1, 3)
        self.store.extend(count)
        self.lists.extend(count)
        self.lengths += [0] * count
        self.certain += [0] * count
        self.high += [0] * count

    def step(self):
        """What a step does: forwards over disjoint rows, some of them twice, and then a commit."""
        rows, written = range(len(self.lengths)), list(self.lengths)
        self.certain = [0] * len(rows)
        parts = [self.int(0, 2) if self.int(0, 1) else 1 for _ in rows]
        for part in (1, 2):
            fed = [row for row in rows if parts[row] == part]
            if not fed:
                continue
            if len({written[row] for row in fed}) == 1 and self.int(0, 9) == 0:  # everything is read again
                width = written[fed[0]] + 1
                self.feed(fed, [0] * len(fed), width)
                for row in fed:
                    written[row] = width
                continue
            for _ in range(self.int(1, 2)):  # a drafter goes on before anything is committed
                fresh = all(written[row] == 0 for row in fed)
                width = self.int(1, 4) if self.int(0, 3) or not fresh else self.int(1, 40)
                # The tail of a row may be there to fill it up, and some of it be drafts.
                kept = [self.int(1, width) for _ in fed]
                sure = [self.int(1, one) for one in kept]
                self.feed(fed, [written[row] for row in fed], width, sure if self.int(0, 1) else None)
                for row, one, most in zip(fed, sure, kept, strict=True):
                    self.certain[row] = written[row] + one
                    written[row] += most
        self.commit(written)

    def feed(self, rows, starts, width, sure=None):
        rows = list(rows)
        level, whole = len(set(starts)) == 1, len(rows) == len(self.lengths)
        start = starts[0] if level else torch.tensor(starts)
        told = None if sure is None else torch.tensor(sure)
        span = KVSpan(
            None if whole else torch.tensor(rows), start, width, max(starts) + width, num_committed=told
        )
        for layer in range(self.layers):
            reach = self.store.visible_slots(layer, span)
            key, value = torch.randn(2, len(rows), HEADS, width, SIZE, generator=self.fresh())
            for line, row in enumerate(rows):  # earlier reads are unchanged
                for at, old in enumerate(self.lists.rows[row][layer][starts[line] : self.lengths[row]]):
                    key[line, :, at], value[line, :, at] = old.split(HEADS)
            keys, values = (torch.as_tensor(self.tensor(one)) for one in self.update(layer, key, value, span))
            for line, (row, first) in enumerate(zip(rows, starts, strict=True)):
                self.lists.write(layer, row, first, torch.stack((key[line], value[line])).flatten(0, 1))
                seen = self.rule(layer, first) if not span.is_first_write else []
                held = self.lists.rows[row][layer]
                place = [at for at, _ in seen] + list(range(first, first + width))
                expected = torch.stack([held[at] for at in place], 1)
                if reach is not None:
                    assert reach.past_lengths[line].item() == len(seen)
                    assert reach.num_slots == keys.shape[2] == values.shape[2]
                else:
                    assert len(seen) == first
                stop = len(place)
                for slot, (at, shift) in enumerate(seen):
                    if shift:
                        expected[:HEADS, slot] = self.moved(held[at][:HEADS], shift)
                assert torch.allclose(keys[line, :, :stop], expected[:HEADS], rtol=0.0, atol=1e-5)
                assert torch.equal(values[line, :, :stop], expected[HEADS:])

    def update(self, layer, key, value, span):
        return self.store.update(layer, key, value, span)

    @staticmethod
    def tensor(one):
        return one if isinstance(one, torch.Tensor) else one.materialize()

    def fresh(self):
        self.count += 1
        return torch.Generator().manual_seed(self.count)

    def commit(self, written):
        """Reorder, fork, drop and cut, no further than the cache allows."""
        rows = len(written)
        moves, cuts = self.int(0, 1), self.int(0, 1)
        parents = (
            [self.int(0, rows - 1) for _ in range(self.int(0, rows + 2))] if moves else list(range(rows))
        )
        back = self.store.max_rewind
        lengths = [
            self.int(max(self.certain[row], self.high[row] - back) if back is not None else 0, written[row])
            if cuts
            else written[row]
            for row in parents
        ]
        self.store.commit(
            torch.tensor(parents, dtype=torch.long) if moves else None,
            torch.tensor(lengths, dtype=torch.long),
        )
        self.lists.commit(parents, lengths)
        self.certain = [0] * len(lengths)
        self.high = [max(self.high[row], length) for row, length in zip(parents, lengths, strict=True)]
        self.lengths = lengths
        assert self.store.lengths.tolist() == lengths
        assert len(self.store) == len(lengths)

    def part(self):
        """Take some rows out into a cache of its own, and put them below."""
        rows = [self.int(0, len(self.lengths) - 1) for _ in range(self.int(0, 3))]
        other = self.store.select(torch.tensor(rows, dtype=torch.long))
        assert other.lengths.tolist() == [self.lengths[row] for row in rows]
        self.store.join(other)
        self.lists.rows += [[list(held) for held in self.lists.rows[row]] for row in rows]
        self.lengths += [self.lengths[row] for row in rows]
        self.high += [self.high[row] for row in rows]
        self.certain = [0] * len(self.lengths)

    def reload(self):
        """Write everything down and read it again."""
        state = self.store.state()
        assert all(one.is_contiguous() for one in state.values())
        assert len({one.data_ptr() for one in state.values() if one.numel()}) == sum(
            1 for one in state.values() if one.numel()
        )
        self.store = self.make()
        self.store.load(state)
        self.store.to("cpu")


def drilled(make, layers, rule, moved=None, examples=60):
    """Run the drill on many drawn sequences of operations."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.integers(0, 2**32), st.integers(1, 8)
    )  # a seed: to draw every choice takes longer than all else
    def holds(seed, steps):
        Drill(make, layers, random.Random(seed), rule, moved).run(steps)

    holds()
