"""Prefixes of a paged cache: references to blocks of its pool, evicted when requests need them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from descant import Finished, GenerationConfig, PrefixCache, Request, SchedulerConfig, Session
from descant.core.interfaces import KVSpan
from descant.kv_cache.row_views import CachedRow, append_rows
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from tests.support import tiny_models as tinies

TOKENS = torch.arange(40)
FIRST = torch.tensor([0])


def filled(store: PagedStore, length: int = 40) -> PagedStore:
    """A store with one row of random keys and values in two layers."""
    store.extend(1)
    span = KVSpan(None, 0, length, length)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        store.update(layer, *(torch.randn(1, 2, length, 4, generator=generator) for _ in range(2)), span)
    store.commit(None, torch.tensor([length]))
    return store


def num_blocks(pool) -> int:
    return int((pool.ref_counts > 0).sum())


def follow(text):
    """A prompt that begins with a text and goes on."""
    return torch.cat((text, TOKENS[:1]))


def test_blocks_are_those_of_the_pool():
    store, prefixes = filled(PagedStore(4)), PrefixCache(block=8)
    prefixes.insert(TOKENS, CachedRow(store))
    assert (len(prefixes), num_blocks(store.pool)) == (5, 10)
    assert prefixes.nbytes == 40 * 2 * 2 * 2 * 4 * 4  # slots, layers, keys and values, heads, size, bytes
    found = prefixes.lookup(follow(TOKENS))
    assert isinstance(found.store, PagedStore)
    other = PagedStore(pool=store.pool)
    append_rows(other, [found])
    assert num_blocks(store.pool) == 10, "a row that starts with a prefix copies nothing"
    for layer in range(2):
        for ours, theirs in zip(other.read(layer, FIRST), store.read(layer, FIRST), strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_outlive_their_row_and_end_with_the_cache():
    store, prefixes = filled(PagedStore(4)), PrefixCache(block=8)
    pool = store.pool
    prefixes.insert(TOKENS[:20], CachedRow(store))  # two blocks, and a half that is not taken
    del store
    gc.collect()
    assert num_blocks(pool) == 4
    assert prefixes.num_unused() == 4
    prefixes.clear()
    assert num_blocks(pool) == 0


def test_a_write_after_a_rollback_leaves_them_alone():
    store, prefixes = filled(PagedStore(4)), PrefixCache(block=8)
    prefixes.insert(TOKENS, CachedRow(store))
    before = [tensor.clone() for tensor in store.read(0, FIRST)]
    store.commit(None, torch.tensor([10]))
    for layer in range(2):
        store.update(layer, torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), KVSpan(None, 10, 5, 15))
    found = prefixes.lookup(follow(TOKENS))
    for ours, theirs in zip(found.store.read(0, FIRST), before, strict=True):
        assert torch.equal(ours, theirs)


def test_the_oldest_unused_blocks_are_evicted_first():
    prefixes, pool = PrefixCache(block=8), PagedStore(4).pool
    texts = [TOKENS[:16] + shift for shift in (0, 100, 200)]
    stores = {shift: filled(PagedStore(pool=pool), 16) for shift in range(3)}
    for shift, store in stores.items():
        prefixes.insert(texts[shift], CachedRow(store))
    del stores[0], stores[1], store
    gc.collect()
    prefixes.lookup(follow(texts[0]))  # used after the second
    assert prefixes.num_unused() == 8
    prefixes.limit_unused(6)
    found = [prefixes.lookup(follow(text)) for text in texts]
    assert [0 if one is None else one.length for one in found] == [16, 8, 16]
    assert prefixes.num_unused() == 0, "what was found is in use"
    del found
    prefixes.limit_unused(0)
    assert len(prefixes) == 2, "blocks in use stay"


def test_a_block_that_is_found_again_is_used_last():
    prefixes, pool = PrefixCache(block=8), PagedStore(4).pool
    for number in range(3):
        prefixes.insert(TOKENS[:8] + 100 * number, CachedRow(filled(PagedStore(pool=pool), 8)))
    gc.collect()
    prefixes.limit_unused(5)  # the first goes
    assert prefixes.lookup(follow(TOKENS[:8] + 100)) is not None
    gc.collect()
    prefixes.limit_unused(2)
    found = [prefixes.lookup(follow(TOKENS[:8] + 100 * number)) is not None for number in range(3)]
    assert found == [False, True, False]


@pytest.mark.parametrize("make_cache", [DenseStore, PagedStore])
def test_other_caches_get_a_copy(make_cache):
    store, prefixes = filled(PagedStore(4)), PrefixCache(block=8)
    prefixes.insert(TOKENS, CachedRow(store))
    other = make_cache()
    append_rows(other, [prefixes.lookup(follow(TOKENS))])
    other.commit(None, torch.tensor([40]))
    for ours, theirs in zip(other.read(1, FIRST), store.read(1, FIRST), strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_of_two_pools_are_read_as_one_row():
    first, second, prefixes = filled(PagedStore(4), 16), filled(PagedStore(8)), PrefixCache(block=8)
    prefixes.insert(TOKENS[:16], CachedRow(first))
    prefixes.insert(TOKENS, CachedRow(second))
    found = prefixes.lookup(follow(TOKENS))
    assert found.length == 40
    keys = found.store.read(0, FIRST)[0]
    assert torch.equal(keys[:, :, :16], first.read(0, FIRST)[0])
    assert torch.equal(keys[:, :, 16:], second.read(0, FIRST)[0][:, :, 16:])


METHODS = {
    "greedy": {},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": list(range(40, 90))},
}


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_prefixes_and_requests_share_a_small_pool(tiny, method, returns):
    """Sequences that have ended while their request runs count too, and those that are returned."""
    llama, config = tiny("llama"), GenerationConfig(max_new_tokens=6, **METHODS[method])
    beginnings = tinies.prompts(llama.arch, [32, 32, 32, 32], 0)
    ends = tinies.prompts(llama.arch, [5] * 12, 1)
    prompts = [beginnings[number % 4] + end for number, end in enumerate(ends)]
    limit = 14
    prefixes = PrefixCache(block=16)
    scheduler = SchedulerConfig(num_blocks=limit, block_size=16)
    session = Session(llama.model, scheduler=scheduler, prefix_cache=prefixes)
    numbers = session.admit(*(Request(prompt, config, return_past_key_values=returns) for prompt in prompts))
    pool = next(session.tables).cache.pool
    results, cached, most = {}, [], 0
    while len(session):
        for event in session.step():
            if isinstance(event, Finished):
                results[event.request] = [one.tokens.tolist() for one in event.hypotheses]
                cached += event.past_key_values
                assert len(event.past_key_values) == len(event.hypotheses) * returns
        most = max(most, num_blocks(pool))
    assert most <= limit
    assert prefixes.report().hits > 0
    for number, prompt in zip(numbers, prompts, strict=True):
        alone = Session(llama.model)
        alone.admit(Request(prompt, config))
        (end,) = [event for event in alone.drain() if isinstance(event, Finished)]
        assert results[number] == [one.tokens.tolist() for one in end.hypotheses]
    del session, event, cached, end, alone
    prefixes.clear()
    gc.collect()
    assert not np.any(pool.ref_counts), "no block is left"
