"""The blocks that requests hold, and those that their next step may add."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from descant.core.interfaces import Array, RowCache
from descant.core.rows import Rows
from descant.engine.scheduling.plan import RequestUsage
from descant.kv_cache.cached_row import unwrap_cache
from descant.kv_cache.cfg_rows import PairedRowCache
from descant.kv_cache.paged import PagedStore

__all__ = ["TableUsage", "block_usage"]


class TableUsage(NamedTuple):
    """The usage of the requests of a table."""

    by_request: dict[int, RequestUsage]
    shared_blocks: int = 0  # that several requests hold, each counted once


class _StoredRows(NamedTuple):
    """The rows of a store that belong to the rows of a table, unconditional ones included."""

    owner: Array  # [M] the index of each one's request in `requests`
    requests: Array  # [Q]
    store_row: Array  # [M] in the store
    held: Array  # [M] positions
    stop: Array  # [M] positions after the next step, at most


def block_usage(cache: RowCache, rows: Rows, widths: Array) -> TableUsage:
    """The usage of every request of a table on a paged store; a block that rows share counts once.

    `widths` [R] are the drafts that a row's next step may add.
    """
    store, index = unwrap_cache(cache, torch.arange(len(rows)))
    assert isinstance(store, PagedStore)
    return _paged_usage(store, _stored_rows(cache, rows, widths, index.numpy()))


def _stored_rows(cache: RowCache, rows: Rows, widths: Array, index: Array) -> _StoredRows:
    """The stored rows of a table, of which the innermost rows are `index` [R]."""
    requests, owner = np.unique(rows.request.numpy(), return_inverse=True)
    held, fed = rows.cached_length.numpy(), rows.pending.numpy() + widths
    if isinstance(cache, PairedRowCache):
        store, _ = unwrap_cache(cache, torch.zeros(0, dtype=torch.long))
        paired = np.flatnonzero(cache.uncond_row.numpy() >= 0)
        uncond = cache.uncond_row.numpy()[paired]
        held = np.concatenate((held, store.lengths.numpy()[uncond]))
        index, owner = np.concatenate((index, uncond)), np.concatenate((owner, owner[paired]))
        fed = np.concatenate((fed, fed[paired]))
    return _StoredRows(owner, requests, index, held, held + fed)


def _paged_usage(store: PagedStore, stored: _StoredRows) -> TableUsage:
    """The usage on a paged store: a block that rows share counts once."""
    pool, size, count = store.pool, store.pool.block_size, len(stored.requests)
    table = store.block_ids(stored.store_row)  # [M, C]
    num_held = (table >= 0).sum(1)
    owners = np.repeat(stored.owner, num_held)
    blocks, num_own, owners = _count_pairs(owners, table[table >= 0], len(pool.ref_counts))
    is_exclusive = num_own == pool.ref_counts[blocks]
    exclusive = np.bincount(owners[is_exclusive], minlength=count)
    shared = np.bincount(owners[~is_exclusive], minlength=count)
    added = np.maximum(-(-stored.stop // size) - num_held, 0)
    new = np.bincount(stored.owner, added, count).astype(np.int64)
    # A row that writes into a block with other references gets a copy of it; the last of them does not.
    writing = np.flatnonzero((stored.held % size > 0) & (num_held > stored.held // size))
    last = table[writing, stored.held[writing] // size]
    blocks_written, num_writing, writers = _count_pairs(stored.owner[writing], last, len(pool.ref_counts))
    copies = num_writing - (num_writing == pool.ref_counts[blocks_written])
    new += np.bincount(writers, copies, count).astype(np.int64)
    num_shared = len(np.unique(blocks[~is_exclusive]))
    return TableUsage(_by_request(stored.requests, exclusive, new, shared), num_shared)


def _count_pairs(owners: Array, blocks: Array, num_blocks: int) -> tuple[Array, Array, Array]:
    """The distinct pairs of an owner and a block [N]: the block, how often it occurs, the owner."""
    num_blocks = max(num_blocks, 1)  # nothing is written yet
    pairs, counts = np.unique(owners * num_blocks + blocks, return_counts=True)
    return pairs % num_blocks, counts, pairs // num_blocks


def _by_request(requests: Array, blocks: Array, added: Array, shared: Array) -> dict[int, RequestUsage]:
    columns = (column.tolist() for column in (requests, blocks, added, shared))
    return {
        request: RequestUsage(held, new, common) for request, held, new, common in zip(*columns, strict=True)
    }
