"""The kernels of one new token per row: torch's attention over the same keys and values, on both stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from descant.core.interfaces import KVSpan
from descant.kv_cache.attention.packed_span import PackedSpan
from descant.kv_cache.kernels import decode_attention
from descant.kv_cache.kernels.decode_attention import DecodeAttention, PagedDecodeAttention
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore

HEADS = 2
KERNELS = {DenseStore: DecodeAttention, PagedStore: PagedDecodeAttention}


def ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.int64)


def forked(store, dims: tuple[int, int] = (16, 16), prompt: int = 70, dtype=torch.float32, more: int = 18):
    """Six rows: four forks of one prompt, two of which share more, and two that share nothing."""
    store.extend(3)
    write(store, np.arange(3), np.zeros(3, dtype=np.int64), np.array([prompt, 5, 21]), dims, dtype)
    store.commit(torch.tensor([0, 0, 1, 0, 2]), torch.tensor([prompt, prompt, 5, prompt - 3, 21]))
    for _ in range(more):
        write(store, np.arange(5), store.lengths.numpy(), ones(5), dims, dtype)
        store.commit(None, store.lengths + 1)
    store.commit(torch.tensor([0, 1, 2, 3, 1, 4]), store.lengths[[0, 1, 2, 3, 1, 4]])
    return store


def write(store, rows, starts, widths, dims, dtype) -> None:
    span, count = PackedSpan(rows, starts, widths), int(widths.sum())
    for layer in range(2):
        key, value = (torch.randn(1, HEADS, count, dim).to(dtype) for dim in dims)
        store.write_packed(layer, key, value, span)


def new_vectors(count: int, repeats: int, dims: tuple[int, int]) -> tuple[Tensor, ...]:
    """A query, a key and a value of each token, with the strides that models give them."""
    query = torch.randn(1, count, HEADS * repeats, dims[0]).transpose(1, 2)
    key = torch.randn(1, count, HEADS, dims[0]).transpose(1, 2)
    return query, key, torch.randn(1, HEADS, count, dims[1])


def kernel_of(store, rows, starts, widths=None):
    """The attention of a forward on a store; None: the kernel does not serve it."""
    span = PackedSpan(np.array(rows), np.array(starts), ones(len(rows)) if widths is None else widths)
    return KERNELS[type(store)].create(store, span)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (20, 36), (16, 8)])
@pytest.mark.parametrize(
    ("block_size", "repeats", "threads"),
    [(None, 1, 1), (None, 3, 1), (16, 3, 1), (16, 1, 12), (5, 2, 1), (32, 4, 4)],
)
def test_it_agrees_with_torch(block_size, dims, repeats, threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    store = DenseStore() if block_size is None else PagedStore(block_size)
    store = forked(store, dims, dtype=dtype, more=(block_size or 16) + 2)
    store.extend(1)  # a row that begins
    rows = np.array([0, 1, 4, 3, 2, 6, 5])
    before = {row: store.read(1, torch.tensor([row])) for row in rows if store.lengths[row]}
    attention = kernel_of(store, rows, store.lengths.numpy()[rows])
    for layer in range(2):
        query, key, value = (one.to(dtype) for one in new_vectors(8, repeats, dims))
        out = attention.attend(query, key, value, layer, 0.3)
    assert not out[0, 7:].any()
    store.commit(None, store.lengths + 1)
    for index, row in enumerate(rows):
        keys, values = store.read(1, torch.tensor([row]))
        old = before.get(row, (keys[:, :, :0], values[:, :, :0]))
        assert torch.equal(keys, torch.cat((old[0], key[:, :, index : index + 1]), 2))
        assert torch.equal(values, torch.cat((old[1], value[:, :, index : index + 1]), 2))
        own = query[:, :, index : index + 1], keys, values
        expected, in_own_type = (
            scaled_dot_product_attention(*(one.to(kind) for one in own), enable_gqa=True, scale=0.3)[0, :, 0]
            for kind in (torch.float32, dtype)
        )
        # Sums are floats in both types, so that an output differs by its own rounding only.
        tolerance = {} if dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-5}
        torch.testing.assert_close(out[0, index].float(), expected, **tolerance)
        assert (out[0, index] - in_own_type).abs().max() <= 2**-6 * expected.abs().max()


def test_a_shared_block_is_planned_once_for_its_rows():
    torch.manual_seed(0)
    store = forked(PagedStore(16))
    starts = store.lengths.numpy()
    plan = decode_attention._plan_blocks(store, PackedSpan(np.arange(6), starts, ones(6)), 2)
    assert plan.parts[:, :2].tolist() == [[0, 2], [2, 3], [3, 5], [5, 6]]
    assert plan.slab_ids == [0]
    num_readers = plan.blocks[:, 5] - plan.blocks[:, 4]
    assert int(num_readers.sum()) == sum(-(-(start + 1) // 16) for start in starts)
    assert num_readers.max() == 2
    assert len(num_readers) < num_readers.sum()


def test_a_long_prompt_in_a_slab_of_its_own():
    torch.manual_seed(0)
    store = forked(PagedStore(16), prompt=600)
    assert len(store.pool.slabs) == 2
    attention = kernel_of(store, range(6), store.lengths.numpy())
    query, key, value = new_vectors(6, 2, (16, 16))
    out = attention.attend(query, key, value, 0, None)
    store.commit(None, store.lengths + 1)
    keys, values = store.read(0, torch.tensor([3]))
    expected = scaled_dot_product_attention(query[:, :, 3:4], keys, values, enable_gqa=True)
    torch.testing.assert_close(out[0, 3], expected[0, :, 0])


@pytest.mark.parametrize(("store_class", "other"), [(DenseStore, PagedStore), (PagedStore, DenseStore)])
def test_it_declines_what_it_does_not_serve(store_class, other, monkeypatch):
    kernel, store = KERNELS[store_class], store_class()
    assert kernel.create(other(), PackedSpan(ones(1) - 1, ones(1) - 1, ones(1))) is None
    assert kernel_of(store, [0], [0], np.array([2])) is None
    store.extend(1)
    attention = kernel_of(store, [0], [0])
    full = torch.zeros(1, 2, 1, 16)
    assert attention.attend(full.half(), full.half(), full.half(), 0, None) is None
    assert attention.attend(full, full.bfloat16(), full.bfloat16(), 0, None) is None
    assert attention.attend(full, full, full, 0, -1.0) is None
    assert attention.attend(full, full, torch.zeros(1, 2, 1, 32)[..., ::2], 0, None) is None
    assert attention.attend(full, full, full, 0, None) is not None
    assert kernel.serves(torch.float32, torch.device("cpu"))
    assert kernel.serves(torch.bfloat16, torch.device("cpu"))
    assert not kernel.serves(torch.float16, torch.device("cpu"))
    monkeypatch.setattr(kernel, "kernel", lambda *_: None)
    assert attention.attend(full, full, full, 0, None) is None
    assert not kernel.serves(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("store_class", KERNELS)
def test_blocks_of_another_type_are_left_to_torch(store_class):
    store = store_class()
    store.extend(1)
    half = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    store.update(0, half, half, KVSpan(None, 0, 3, 3))
    store.commit(None, torch.tensor([3]))
    full = torch.zeros(1, 2, 1, 16)
    assert kernel_of(store, [0], [3]).attend(full, full, full, 0, None) is None
