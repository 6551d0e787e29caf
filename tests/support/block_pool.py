"""Consistency checks of the paged cache's block pool."""

from __future__ import annotations

import numpy as np

from descant.kv_cache.block_pool import BlockPool
from descant.kv_cache.stores.paged import PagedStore

__all__ = ["check_ref_counts", "num_used_blocks"]


def num_used_blocks(pool: BlockPool) -> int:
    """The number of referenced blocks."""
    return int((pool.ref_counts > 0).sum())


def check_ref_counts(pool: BlockPool, *stores: PagedStore) -> None:
    """Raise if reference counts, free lists or slabs disagree with the block tables of a pool's stores."""
    expected = np.zeros_like(pool.ref_counts)
    for store in stores:
        if store.pool is pool:
            expected += np.bincount(store.referenced_blocks(), minlength=len(expected))
    if (expected != pool.ref_counts).any():
        wrong = np.flatnonzero(expected != pool.ref_counts).tolist()
        raise RuntimeError(
            f"blocks {wrong} must have reference counts {expected[wrong]}, got {pool.ref_counts[wrong]}"
        )
    free = sorted([*pool._free_blocks, *pool._unused_ids])
    if free != np.flatnonzero(pool.ref_counts == 0).tolist():
        raise RuntimeError("the free blocks are not the unreferenced blocks")
    live = {slab: int((pool.ref_counts[pool.slab_of == slab] > 0).sum()) for slab in pool._live_blocks}
    if live != pool._live_blocks or set(pool.slabs) != {0, *pool._live_blocks}:
        raise RuntimeError("a slab outlives its last block")
