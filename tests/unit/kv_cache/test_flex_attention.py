"""FlexAttention for decode steps: the same as torch's attention row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from descant.core.interfaces import KVSpan
from descant.kv_cache.attention.packed_span import PackedSpan
from descant.kv_cache.kernels import packed_attention
from descant.kv_cache.kernels.packed_attention import FlexDecodeAttention
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_it_agrees_with_torch(monkeypatch):
    """As it is: to compile it for a CPU, on which it is not used, takes a minute."""
    monkeypatch.setattr(packed_attention, "_compiled_flex", lambda _: flex_attention)
    torch.manual_seed(0)
    rows, starts, heads, repeats, size = [2, 0, 1], np.array([5, 130, 0]), 2, 3, 16
    count = len(rows)
    keys, values = torch.randn(3, heads, 140, size), torch.randn(3, heads, 140, size)
    store = DenseStore()
    store.extend(3)
    store.update(0, keys, values, KVSpan(None, 0, 140, 140))
    query = torch.randn(1, heads * repeats, count + 1, size)
    key, value = torch.randn(1, heads, count + 1, size), torch.randn(1, heads, count + 1, size)
    attention = FlexDecodeAttention(store, PackedSpan(np.array(rows), starts, np.ones(count, dtype=np.int64)))
    out = attention.attend(query, key, value, 0, None)
    assert out.shape == (1, count + 1, heads * repeats, size)
    assert not out[0, count:].any()
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        own_keys = torch.cat((keys[row, :, :start], key[0, :, index : index + 1]), 1)
        own_values = torch.cat((values[row, :, :start], value[0, :, index : index + 1]), 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, index : index + 1], own_keys[None], own_values[None], enable_gqa=True
        )
        torch.testing.assert_close(out[0, index], expected[0, :, 0], atol=1e-5, rtol=1e-5)


def test_it_is_for_decode_steps_on_a_gpu():
    step = PackedSpan(np.array([0]), np.array([3]), np.array([1]))
    longer = PackedSpan(np.array([0]), np.array([3]), np.array([2]))
    cuda = torch.device("cuda")
    assert FlexDecodeAttention.create(DenseStore(), step, cuda) is not None
    assert FlexDecodeAttention.create(DenseStore(), step, torch.device("cpu")) is None
    assert FlexDecodeAttention.create(DenseStore(), longer, cuda) is None
    assert FlexDecodeAttention.create(PagedStore(), step, cuda) is None
