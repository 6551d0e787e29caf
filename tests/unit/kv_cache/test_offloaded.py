"""The offloaded caches: locations and prefetching. The other device is simulated."""

from __future__ import annotations

import copy

import pytest
import torch

from bench.fake_devices import FIRST, SECOND, placed, pretended
from descant import GenerationConfig, Request, Session
from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.dense import OffloadedStaticStore, OffloadedStore
from descant.testing import ReferenceCache
from descant.testing.outcome import compare, outcomes
from tests.contracts.subjects import of_method
from tests.support.tiny_models import prompts

LAYERS, HEADS, SIZE = 3, 2, 3
HOST = torch.device("cpu")


def feed(cache, width, start=0, rows=None, device=FIRST):
    """A forward of three layers, from a device; what each layer holds then, on the host."""
    count = len(cache) if rows is None else len(rows)
    where = None if rows is None else torch.tensor(rows).to(device)
    begin = start if isinstance(start, int) else torch.tensor(start).to(device)
    starts = None if isinstance(start, int) else torch.tensor(start)
    stop = int(torch.as_tensor(start).max()) + width
    span = KVSpan(where, begin, width, stop, None if rows is None else torch.tensor(rows), starts)
    seen = []
    for layer in range(LAYERS):
        block = torch.randn(count, HEADS, width, SIZE).to(device)
        keys, values = cache.update(layer, block, block * 2, span)
        assert keys.device == values.device == device
        seen.append((keys.cpu(), values.cpu()))
    return seen


def prepared_cache(cache, rows=2):
    cache.extend(rows)
    return cache


@pytest.fixture(autouse=True)
def devices(tiny):
    tiny("llama")
    with pretended():
        yield


@pytest.mark.parametrize("kind", ["dense", "static"])
def test_blocks_rest_on_the_other_device(kind):
    cache = prepared_cache(OffloadedStore() if kind == "dense" else OffloadedStaticStore(16))
    feed(cache, 4)
    cache.commit(None, torch.tensor([4, 4]))
    feed(cache, 1, start=4)
    cache.commit(torch.tensor([1, 1, 0]), torch.tensor([5, 4, 3]))
    feed(cache, 2, start=[5, 4, 3])
    cache.commit(None, torch.tensor([7, 6, 5]))
    assert {block.device for store in (cache._keys, cache._values) for block in store.values()} == {HOST}
    assert cache.prefetched_bytes == 0
    assert {one.device for one in cache.state().values()} == {HOST}


def test_the_next_layer_is_sent_for_while_one_is_used(monkeypatch):
    cache = prepared_cache(OffloadedStore())
    feed(cache, 4)
    cache.commit(None, torch.tensor([4, 4]))
    fetched = []
    plain = OffloadedStore._fetch_layer
    monkeypatch.setattr(
        OffloadedStore,
        "_fetch_layer",
        lambda self, layer, *more: fetched.append(layer) or plain(self, layer, *more),
    )
    span = KVSpan(None, 4, 1, 5)
    ahead = []
    for layer in range(LAYERS):
        block = torch.ones(2, HEADS, 1, SIZE).to(FIRST)
        cache.update(layer, block, block, span)
        ahead.append(cache._prefetched_layer and cache._prefetched_layer.layer)
    assert fetched == [0, 1, 2]  # each once
    assert ahead == [1, 2, None]


def test_the_model_has_two_layers_at_the_most():
    cache = prepared_cache(OffloadedStore())
    feed(cache, 100)
    cache.commit(None, torch.tensor([100, 100]))
    block = torch.ones(2, HEADS, 1, SIZE).to(FIRST)
    for layer in range(LAYERS):  # the first token after a prompt makes room for more
        cache.update(layer, block, block, KVSpan(None, 100, 1, 101))
    cache.commit(None, torch.tensor([101, 101]))
    whole = cache.nbytes
    cache.update(0, block, block, KVSpan(None, 101, 1, 102))
    assert cache.prefetched_bytes == whole // LAYERS  # besides the one that was returned
    assert cache.nbytes == whole + cache.prefetched_bytes
    cache.commit(None, torch.tensor([101, 101]))  # the forward went no further
    assert cache.nbytes == whole


def test_a_layer_that_was_sent_for_and_changed_since_is_not_used():
    """A forward over the first layers alone, then another one."""
    cache, lists = prepared_cache(OffloadedStore()), prepared_cache(ReferenceCache())
    blocks = [torch.randn(2, HEADS, 3, SIZE) for _ in range(LAYERS)]
    for layer, block in enumerate(blocks):
        cache.update(layer, block.to(FIRST), block.to(FIRST), KVSpan(None, 0, 3, 3))
        lists.update(layer, block, block, KVSpan(None, 0, 3, 3))
    for one in (cache, lists):
        one.commit(None, torch.tensor([3, 3]))
    draft = torch.randn(2, HEADS, 1, SIZE)
    cache.update(0, draft.to(FIRST), draft.to(FIRST), KVSpan(None, 3, 1, 4))
    lists.update(0, draft, draft, KVSpan(None, 3, 1, 4))
    for one in (cache, lists):
        one.commit(torch.tensor([1, 0]), torch.tensor([3, 3]))
    for layer in range(LAYERS):
        new, span = torch.randn(2, HEADS, 2, SIZE), KVSpan(None, 3, 2, 5)
        keys, _ = cache.update(layer, new.to(FIRST), new.to(FIRST), span)
        must, _ = lists.update(layer, new, new, span)
        assert torch.equal(keys.cpu(), must)


def test_layers_of_one_model_may_compute_on_different_devices():
    cache, lists = prepared_cache(OffloadedStore()), prepared_cache(ReferenceCache())
    for start, width in ((0, 3), (3, 1), (4, 2)):
        span = KVSpan(None, start, width, start + width)
        for layer, device in enumerate((FIRST, SECOND, FIRST)):
            new = torch.randn(2, HEADS, width, SIZE)
            keys, values = cache.update(layer, new.to(device), -new.to(device), span)
            must, also = lists.update(layer, new, -new, span)
            assert keys.device == device
            assert torch.equal(keys.cpu(), must)
            assert torch.equal(values.cpu(), also)
        for one in (cache, lists):
            one.commit(None, torch.tensor([start + width] * 2))


def test_a_static_one_has_its_limits():
    cache = prepared_cache(OffloadedStaticStore(4, rows=2))
    feed(cache, 3)
    cache.commit(None, torch.tensor([3, 1]))
    with pytest.raises(InputError, match="must be >= the 3 rows in use"):
        cache.extend(1)
    seen = feed(cache, 2, start=[3, 1])  # the longest row is given one token, and filled up
    assert [list(keys.shape) for keys, _ in seen] == [[2, HEADS, 4, SIZE]] * LAYERS
    cache.commit(None, torch.tensor([4, 3]))
    with pytest.raises(InputError, match="must be >= the 5 positions"):
        feed(cache, 1, start=4, rows=[0])
    assert cache.select(torch.tensor([1, 0])).lengths.tolist() == [3, 4]


def test_it_can_rest_elsewhere():
    cache = prepared_cache(OffloadedStore(SECOND))
    seen = feed(cache, 2)
    cache.commit(None, torch.tensor([2, 2]))
    assert cache._keys[0].device == SECOND
    assert cache.select(torch.tensor([1]))._keys[0].device == SECOND
    cache.to("cpu")
    assert cache._keys[0].device == HOST
    after = feed(cache, 1, start=2)
    assert all(torch.equal(two[0][:, :, :2], one[0]) for one, two in zip(seen, after, strict=True))


@pytest.mark.ci_cases("beam-4")
@pytest.mark.parametrize("method", ["sampling-fanned", "beam-4"])
def test_a_model_on_a_device_with_its_cache_on_the_host(tiny, method):
    one = tiny("llama")
    requests = of_method(one, method, count=2)
    expected = outcomes(one.model, requests, cache=ReferenceCache())
    model = placed(copy.deepcopy(one.model), lambda _: FIRST)
    for cache in (OffloadedStore(), OffloadedStaticStore(32)):
        found = outcomes(model, requests, cache=cache)
        for place, (first, second) in enumerate(zip(expected, found, strict=True)):
            compare(first, second, f"request {place}")


def test_a_session_on_the_host_alone_copies_nothing(tiny):
    one = tiny("llama")
    session = Session(one.model, cache=OffloadedStore())
    session.admit(Request(prompts(one.arch, [5], 2)[0], GenerationConfig(max_new_tokens=4)))
    list(session.drain())
    assert session._tables.default.cache._streams == {}
    assert session._tables.default.cache._prefetched_layer is None
