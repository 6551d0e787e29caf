"""Several caches as one: every part follows the rows, and none receives more than it supports."""

from __future__ import annotations

import pytest
import torch

from descant.kv_cache.row_views import MultiModelCache
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from descant.testing import ReferenceCache


@pytest.mark.parametrize(
    ("parts", "rewind"),
    [
        ([DenseStore(), DenseStore()], None),
        ([DenseStore(), RecurrentStateCache()], None),
        ([RecurrentStateCache(), DenseStore()], None),
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
