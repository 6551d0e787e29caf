"""The static cache beyond the law of caches: its fixed allocation, and inputs beyond its capacity."""

from __future__ import annotations

import pytest
import torch

from descant.config.compile_config import CompileConfig
from descant.core.interfaces import KVSpan
from descant.errors import InputError
from descant.kv_cache.stores.dense import StaticStore, round_up_rows
from descant.testing import ReferenceCache

HEADS, SIZE = 2, 3


def feed(cache, width, rows=None, start=0):
    """Write `width` new positions; what was written, and what the rows hold then."""
    count = len(cache) if rows is None else len(rows)
    block = torch.randn(count, HEADS, width, SIZE)
    where = None if rows is None else torch.tensor(rows)
    begin = start if isinstance(start, int) else torch.tensor(start)
    span = KVSpan(where, begin, width, int(torch.as_tensor(start).max()) + width)
    return block, cache.update(0, block, -block, span)


def places(cache):
    keys, values = cache.layer_views(1)
    return [block.data_ptr() for blocks in (keys, values) for block in blocks.values()]


def test_blocks_stay_where_they_are():
    cache = StaticStore(16, rows=4)
    cache.extend(1)
    feed(cache, 5)
    before, size = places(cache), cache.nbytes
    cache.commit(torch.tensor([0, 0, 0, 0]), torch.tensor([5, 5, 4, 3]))
    feed(cache, 2, start=[5, 5, 4, 3])
    cache.commit(torch.tensor([3, 1, 0]), torch.tensor([5, 7, 6]))
    cache.extend(1)
    feed(cache, 3, rows=[3])
    cache.commit(torch.tensor([3, 0]), torch.tensor([3, 5]))
    assert (places(cache), cache.nbytes) == (before, size)
    assert size == 2 * 4 * HEADS * 16 * SIZE * 4


def test_rows_come_in_powers_of_two_where_none_are_named():
    cache = StaticStore(8)
    sizes = []
    for _ in range(5):
        cache.extend(1)
        feed(cache, 1)
        sizes.append(cache.nbytes // (2 * HEADS * 8 * SIZE * 4))
    assert sizes == [1, 2, 4, 4, 8]
    assert (round_up_rows(5), round_up_rows(17)) == (8, 32)


@pytest.mark.parametrize(("slots", "found"), [(1, 256), (256, 256), (257, 512), (1000, 1024)])
def test_a_compiled_cache_has_a_round_capacity(slots, found):
    assert StaticStore(slots, compile_config=CompileConfig()).capacity == found
    assert StaticStore(slots).capacity == slots


# ---------------------------------------------------------------------- lending
def test_what_is_lent_is_the_cache_itself():
    cache = StaticStore(8)
    cache.extend(2)
    assert cache.layer_views(2) is None
    block, _ = feed(cache, 3)
    cache.commit(None, torch.tensor([3, 3]))
    keys, values = cache.layer_views(2)
    assert list(keys[0].shape) == [2, HEADS, 8, SIZE]
    assert torch.equal(keys[0][:, :, :3], block)
    values[0][1, :, 3] = 7.0
    keys[0][1, :, 3] = 5.0
    cache.commit(None, torch.tensor([3, 4]))
    _, (seen, also) = feed(cache, 1, rows=[1], start=4)
    assert bool((seen[0, :, 3] == 5).all())
    assert bool((also[0, :, 3] == 7).all())


def test_more_rows_can_be_lent_than_there_are_and_again_until_the_blocks_move():
    cache = StaticStore(8)
    cache.extend(3)
    block, _ = feed(cache, 2)
    first = cache.layer_views(4)
    assert cache.layer_views(4) is first
    keys, _ = cache.layer_views(8)
    assert list(keys[0].shape) == [8, HEADS, 8, SIZE]
    assert torch.equal(keys[0][:3, :, :2], block)
    assert cache.layer_views(4)[0][0].data_ptr() == keys[0].data_ptr() != first[0][0].data_ptr()
    before = cache.layer_views(4)
    cache.to("cpu")
    assert cache.layer_views(4) is not before


# ---------------------------------------------------------------------- limits
@pytest.mark.parametrize("given", [{"capacity": 0}, {"capacity": 4, "rows": 0}])
def test_no_room_at_all_is_an_error(given):
    with pytest.raises(InputError, match="must be >= 1"):
        StaticStore(**given)


def test_a_row_that_does_not_fit_is_an_error_and_changes_nothing():
    cache = StaticStore(4)
    cache.extend(1)
    feed(cache, 3)
    cache.commit(None, torch.tensor([3]))
    before = cache.state()
    with pytest.raises(InputError, match="must be >= the 5 positions of a row, got 4"):
        feed(cache, 2, start=3)
    assert all(torch.equal(before[name], one) for name, one in cache.state().items())
    _, (keys, _) = feed(cache, 1, start=3)
    assert keys.shape[2] == 4


def test_what_fills_shorter_rows_up_need_not_fit():
    cache, lists = StaticStore(6), ReferenceCache()
    for one in (cache, lists):
        one.extend(3)
    first = torch.randn(3, HEADS, 5, SIZE)
    lengths = torch.tensor([5, 1, 3])
    for one in (cache, lists):
        one.update(0, first, -first, KVSpan(None, 0, 5, 5))
        one.commit(None, lengths)
    # One token for the first row, four for the second: 5 + 4 is more than there are slots.
    new = torch.randn(2, HEADS, 4, SIZE)
    span = KVSpan(torch.tensor([0, 1]), torch.tensor([5, 1]), 4, 9)
    assert cache.visible_slots(0, span).past_lengths.tolist() == [5, 1]
    assert cache.visible_slots(0, span).num_slots == 6
    keys, values = cache.update(0, new, -new, span)
    must, _ = lists.update(0, new, -new, span)
    assert list(keys.shape) == [2, HEADS, 6, SIZE]
    assert torch.equal(keys[0], must[0, :, :6])
    assert torch.equal(values[1, :, :5], -must[1, :, :5])
    cache.commit(None, torch.tensor([6, 5, 3]))
    assert torch.equal(cache.select(torch.tensor([2])).state()["keys.0"][0], first[2, :, :3])
    with pytest.raises(InputError, match="must be >= the 7 positions"):
        cache.commit(None, torch.tensor([7, 5, 3]))
    assert cache.lengths.tolist() == [6, 5, 3]


def test_more_rows_than_named_are_an_error():
    cache = StaticStore(4, rows=2)
    cache.extend(2)
    feed(cache, 1)
    with pytest.raises(InputError, match="must be >= the 3 rows in use, got 2"):
        cache.extend(1)
    with pytest.raises(InputError, match="must be >= the 3 rows in use"):
        cache.commit(torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match="must be >= the 3 rows in use"):
        cache.select(torch.tensor([0, 1, 1]))
    assert len(cache) == 2


def test_what_is_taken_over_has_to_fit():
    long, short = StaticStore(9), StaticStore(4)
    long.extend(1)
    feed(long, 6)
    long.commit(None, torch.tensor([6]))
    for take in (lambda: short.join(long), lambda: short.load(long.state())):
        with pytest.raises(InputError, match="must be >= the 6 positions"):
            take()
    assert len(short) == 0
    long.commit(None, torch.tensor([4]))
    short.join(long)
    assert short.lengths.tolist() == [4]
