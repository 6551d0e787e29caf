"""A request's past: a row, a cache of one row, or a cache with the transformers API."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from descant import InputError
from descant.core.interfaces import KVSpan
from descant.engine.tables.prefix_reuse import as_cached_row
from descant.kv_cache.row_views import CachedRow
from descant.kv_cache.stores.dense import DenseStore


def filled(rows):
    store = DenseStore()
    store.extend(rows)
    block = torch.ones(rows, 1, 3, 2)
    store.update(0, block, block, KVSpan(None, 0, 3, 3))
    store.commit(None, torch.full((rows,), 3))
    return store


def test_every_kind_of_past_becomes_a_row():
    store = filled(1)
    row = CachedRow(store)
    assert as_cached_row(row) is row
    assert as_cached_row(store).store is store
    assert as_cached_row(SimpleNamespace(commit_store=lambda: store)).store is store


@pytest.mark.parametrize("past", [filled(2), SimpleNamespace(commit_store=lambda: filled(2)), object()])
def test_anything_else_is_refused(past):
    with pytest.raises(InputError, match=r"must be a `CachedRow`, or a cache of one row"):
        as_cached_row(past)
