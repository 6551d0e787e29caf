"""Blocks whose owners end in another thread than the one that uses the pool."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from descant import Hypothesis
from descant.engine.tables.prefix_reuse import FinishedKV
from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.row_views import CachedRow
from descant.kv_cache.stores.paged import PagedStore
from tests.support.block_pool import check_ref_counts


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_reclaimable", [False, True])
def test_another_thread_leaves_the_counts_alone(is_reclaimable):
    pool = BlockPool(4)
    blocks = np.array(pool.allocate(3))
    stores = [PagedStore.of_blocks(pool, blocks)]
    if is_reclaimable:
        stores[0].mark_reclaimable()
    in_thread(stores.clear)
    assert pool.ref_counts[blocks].tolist() == [2, 2, 2]
    pool.allocate(1)
    assert pool.ref_counts[blocks].tolist() == [1, 1, 1]
    assert pool.reclaimable[blocks].tolist() == [0, 0, 0]


def test_its_own_thread_frees_at_once():
    pool = BlockPool(4)
    blocks = np.array(pool.allocate(2))
    stores = [PagedStore.of_blocks(pool, blocks)]
    stores.clear()
    assert pool.ref_counts[blocks].tolist() == [1, 1]


def test_idle_rows_may_vanish_while_they_are_limited():
    pool = BlockPool(4)
    blocks = pool.allocate(8)
    kept, sequences = (
        FinishedKV(is_pool_limited=True),
        [Hypothesis(torch.tensor([1]), "eos") for _ in range(4)],
    )
    for number, sequence in enumerate(sequences):
        store = PagedStore.of_blocks(pool, np.array(blocks[2 * number : 2 * number + 2]))
        store.mark_reclaimable()
        key = id(sequence)
        kept._entries[key] = (None, CachedRow(store))
    pool.decref(np.array(blocks))
    del store

    class Vanishing(dict):
        """Entries of which all are gone once they are listed."""

        def __iter__(self):
            found = list(super().__iter__())
            self.clear()
            return iter(found)

    kept._entries = Vanishing(kept._entries)
    kept.limit_idle(0)
    assert len(kept) == 0
    assert pool.num_idle == 0
    check_ref_counts(pool)


@pytest.mark.parametrize(("limit", "num_left"), [(8, 4), (4, 2), (3, 1), (0, 0)])
def test_no_more_idle_rows_are_dropped_than_the_limit_asks_for(limit, num_left):
    pool = BlockPool(4)
    blocks = pool.allocate(8)
    finished = FinishedKV(is_pool_limited=True)
    for number in range(4):
        store = PagedStore.of_blocks(pool, np.array(blocks[2 * number : 2 * number + 2]))
        store.mark_reclaimable()
        finished._entries[number] = (None, CachedRow(store))
    del store
    pool.decref(np.array(blocks))
    finished.limit_idle(limit)
    assert list(finished._entries) == list(range(4 - num_left, 4))
    assert pool.num_idle == 2 * num_left
