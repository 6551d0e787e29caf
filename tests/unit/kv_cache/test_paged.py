"""The paged cache beyond the law of caches: what it shares, what it copies, and how it is read."""

from __future__ import annotations

import pytest
import torch

from descant import GenerationConfig, Request, Session
from descant.core.interfaces import KVSpan
from descant.engine.planning import cache_factory
from descant.kv_cache.attention import shared_prefix_attention
from descant.kv_cache.attention.attention_proxy import KVProxy
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from tests.support.block_pool import num_used_blocks
from tests.support.tiny_models import prompts

HEADS, SIZE = 2, 4


def feed(store, width, start=0, layer=0):
    """Write `width` new positions of every row; what was written and what comes back."""
    key = torch.randn(len(store), HEADS, width, SIZE)
    return key, store.update(layer, key, -key, KVSpan(None, start, width, start + width))


def filled(rows=1, length=100, block=16):
    """A store whose rows are forks of one prompt."""
    store = PagedStore(block)
    store.extend(1)
    feed(store, length)
    store.commit(torch.zeros(rows, dtype=torch.long), torch.full((rows,), length))
    return store


def test_a_fork_shares_blocks_and_only_a_block_that_is_written_is_copied():
    store = filled()  # 100 positions: the seventh block has four
    held, bytes_before = num_used_blocks(store.pool), store.nbytes
    store.commit(torch.zeros(3, dtype=torch.long), torch.full((3,), 100))
    assert (num_used_blocks(store.pool), store.nbytes, store.copied_slots) == (held, bytes_before, 0)
    feed(store, 1, start=100)
    assert store.copied_slots == 2 * 4  # the last one keeps the block
    assert num_used_blocks(store.pool) == 7 + 2
    store.commit(torch.tensor([1, 1, 2]), torch.full((3,), 101))
    before = store.copied_slots
    store.commit(torch.tensor([2, 0, 1]), torch.full((3,), 101))
    assert store.copied_slots == before


@pytest.fixture
def dtype(request):
    """The dtype of new tensors."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def attention(query, keys, values, **more):
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, **more)


@pytest.mark.parametrize("worth", [4, 64])
@pytest.mark.parametrize("masked", [None, "bits", "added"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], indirect=True)
def test_attention_on_shared_rows_is_that_on_rows_laid_out(monkeypatch, worth, masked, width, dtype):
    monkeypatch.setattr(shared_prefix_attention, "_MIN_SHARED_SLOTS", worth)
    store = filled(rows=5, length=70, block=4)
    feed(store, 2, start=70)  # parts the rows
    # Two of the five continue, and an unrelated row of the same length joins.
    store.commit(torch.tensor([0, 1, 1, 3, 4]), torch.full((5,), 72))
    store.extend(1)
    key = torch.randn(1, HEADS, 72, SIZE)
    store.update(0, key, -key, KVSpan(torch.tensor([5]), 0, 72, 72))
    store.commit(None, torch.full((6,), 72))
    _, (keys, values) = feed(store, width, start=72)
    assert isinstance(keys, KVProxy)
    query = torch.randn(6, 2 * HEADS, width, SIZE)
    mask = None
    if masked is not None:
        mask = torch.ones(6, 1, width, 72 + width, dtype=torch.bool).tril(72)
        mask[..., :30] = torch.rand(30) > 0.5
        mask[0, ..., :70] = False  # sees nothing of what it shares
    if masked == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found = attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    expected = attention(query, keys.materialize(), values.materialize(), attn_mask=mask, enable_gqa=True)
    error = 1e-5 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, atol=error, rtol=error)
    assert bool(keys.plan.shared_segments) == (worth == 4 or worth <= 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], indirect=True)
def test_without_the_fused_kernel_attention_is_the_same(dtype):
    query, keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.rand(2, 1, 4, 9) > 0.4
    one, sums = shared_prefix_attention._attention_with_lse(query, keys, values, mask, None)
    wide = torch.cat((values, values), -1)  # values of another size, which the kernel does not take
    two, others = shared_prefix_attention._attention_with_lse(query, keys, wide, mask, None)
    error = 1e-5 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(two[..., :8], one, atol=error, rtol=error)
    torch.testing.assert_close(others, sums, atol=error, rtol=error)


def test_heads_that_are_repeated_are_not_laid_out():
    store = filled(rows=3)
    _, (keys, values) = feed(store, 1, start=100)
    wide = [
        one[:, :, None, :, :].expand(3, HEADS, 2, 101, SIZE).reshape(3, 2 * HEADS, 101, SIZE)
        for one in (keys, values)
    ]
    assert all(isinstance(one, KVProxy) for one in wide)
    query = torch.randn(3, 2 * HEADS, 1, SIZE)
    expected = attention(query, *(one.materialize().repeat_interleave(2, 1) for one in (keys, values)))
    torch.testing.assert_close(attention(query, *wide), expected, atol=1e-5, rtol=1e-5)
    assert wide[0]._materialized is None


def test_for_anything_but_attention_lazy_keys_are_the_tensor():
    store = filled(rows=2)
    _, (keys, values) = feed(store, 1, start=100)
    dense = keys.materialize()
    assert torch.equal(torch.cat((keys, values), 2), torch.cat((dense, values.materialize()), 2))
    assert torch.equal(keys.transpose(2, 3), dense.transpose(2, 3))
    assert torch.equal(torch.ones(2, HEADS, 1, SIZE) @ keys.transpose(2, 3), dense.sum(-1)[:, :, None])
    assert torch.equal(keys[:, :, -1:], dense[:, :, -1:])
    assert torch.equal(keys * 2.0, dense * 2.0)
    assert (keys.shape, keys.ndim, keys.size(2), len(keys)) == (dense.shape, 4, 101, 2)


def test_long_prompts_of_many_rows_are_paged_and_short_ones_are_not(tiny, monkeypatch):
    model = tiny("llama")

    def cache(*lengths, **fields):
        session = Session(model.model)
        ids = prompts(model.arch, list(lengths), seed=1)
        session.admit(*(Request(one, GenerationConfig(**fields)) for one in ids))
        return type(session._tables.default.cache)

    assert cache(80, num_beams=3) is DenseStore  # a model of this size reads a copy faster than shared blocks
    monkeypatch.setattr(cache_factory, "_MIN_SHARED_READ", 120 * model.model.config.hidden_size)
    assert cache(80, num_beams=3) is PagedStore
    assert cache(80, num_return_sequences=2, do_sample=True) is PagedStore
    assert cache(80, penalty_alpha=0.6, top_k=3) is PagedStore
    assert cache(80) is DenseStore
    assert cache(20, num_beams=3) is DenseStore
    assert cache(20, 20, num_beams=3) is PagedStore  # what all prompts share counts
    assert cache(20, cache_implementation="paged") is PagedStore
