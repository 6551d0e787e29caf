"""Several caches as one: every part follows the rows, and none receives more than it supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from descant.core.interfaces import KVSpan
from descant.kv_cache.row_views import MultiModelCache
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.testing import ReferenceCache, check_cache


class Pair(MultiModelCache):
    """Two caches of keys that are written alike, read as the one at `place`."""

    def __init__(self, place: int, parts: Sequence[DenseStore] = ()) -> None:
        super().__init__(parts or [DenseStore(), DenseStore()])
        self._place = place
        self._lengths = self.parts[place].lengths

    def update(self, layer: int, key: Tensor, value: Tensor, span: KVSpan) -> tuple[Tensor, Tensor]:
        read: list[Any] = [part.update(layer, key, value, span) for part in self.parts]
        return read[self._place]

    def visible_slots(self, layer: int, span: KVSpan) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def select(self, rows: Tensor) -> Pair:
        return Pair(self._place, [part.select(rows) for part in self.parts])

    def join(self, other: Pair) -> None:
        for part, theirs in zip(self.parts, other.parts, strict=True):
            part.join(theirs)
        self._lengths = self.parts[self._place].lengths

    def to(self, device: str) -> None:
        for part in self.parts:
            part.to(device)

    def state(self) -> dict[str, Tensor]:
        return self.parts[self._place].state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            part.load(state)
        self._lengths = self.parts[self._place].lengths


@pytest.mark.ci_cases("0")
@pytest.mark.parametrize("place", [0, 1])
def test_every_part_follows_the_rows(place):
    check_cache(lambda: Pair(place), examples=50)


@pytest.mark.parametrize(
    ("parts", "rewind"),
    [
        ([DenseStore(), DenseStore()], None),
        ([DenseStore(), RecurrentStateCache()], 0),
        ([RecurrentStateCache(), DenseStore()], 0),
    ],
)
def test_rows_go_back_as_far_as_the_part_that_goes_back_least(parts, rewind):
    assert MultiModelCache(parts).max_rewind == rewind


def test_a_limit_above_zero_is_kept():
    far, near = ReferenceCache(), ReferenceCache()
    far.max_rewind, near.max_rewind = 9, 4
    assert MultiModelCache([DenseStore(), far, near]).max_rewind == 4


def test_lengths_are_those_of_the_parts():
    cache = MultiModelCache([DenseStore(), RecurrentStateCache()])
    cache.extend(2)
    assert (len(cache), cache.lengths.tolist()) == (2, [0, 0])
    cache.commit(torch.tensor([1, 0, 1]), torch.tensor([4, 5, 4]))
    cache.extend(1)
    assert [len(cache), *(len(part) for part in cache.parts)] == [4, 4, 4]
    assert cache.lengths.tolist() == [4, 5, 4, 0]
    assert all(part.lengths.tolist() == [4, 5, 4, 0] for part in cache.parts)
