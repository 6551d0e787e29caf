"""The dense cache beyond the law of caches: what it copies, and what it holds."""

from __future__ import annotations

import pytest
import torch

from descant import GenerationConfig, Request, Session
from descant.core.interfaces import KVSpan
from descant.kv_cache.dense import DenseStore
from tests.support.tiny_models import prompts

HEADS, SIZE = 2, 3


def feed(cache, width, rows=None, start=0, stop=None):
    """Write `width` new positions; what the rows hold then."""
    count = len(cache) if rows is None else len(rows)
    block = torch.randn(count, HEADS, width, SIZE)
    where = None if rows is None else torch.tensor(rows)
    last = start if isinstance(start, int) else int(torch.tensor(start).max())
    begin = start if isinstance(start, int) else torch.tensor(start)
    return block, cache.update(0, block, -block, KVSpan(where, begin, width, stop or last + width))


def test_keys_and_values_come_back():
    cache = DenseStore()
    cache.extend(2)
    first, (keys, values) = feed(cache, 3)
    cache.commit(None, torch.tensor([3, 3]))
    second, (keys, values) = feed(cache, 2, start=3)
    assert torch.equal(keys, torch.cat((first, second), 2))
    assert torch.equal(values, -keys)
    assert (len(cache), cache.lengths.tolist()) == (2, [3, 3])


def test_a_long_text_outgrows_the_first_block():
    cache = DenseStore()
    cache.extend(1)
    parts = []
    for start in range(0, 300, 10):
        block, (keys, _) = feed(cache, 10, start=start)
        parts.append(block)
        cache.commit(None, torch.tensor([start + 10]))
        assert torch.equal(keys, torch.cat(parts, 2))


def test_a_fork_copies_the_new_row_and_not_the_old_one():
    cache = DenseStore()
    cache.extend(1)
    feed(cache, 5)
    cache.commit(torch.tensor([0, 0, 0]), torch.tensor([5, 5, 5]))
    assert cache.copied_slots == 10


def test_one_row_more_doubles_the_memory():
    cache = DenseStore()
    cache.extend(3)
    feed(cache, 5)
    before = cache.nbytes
    cache.commit(torch.tensor([0, 1, 2, 0]), torch.tensor([5, 5, 5, 5]))
    assert cache.nbytes == 2 * before


def test_moves_among_kin_copy_only_what_came_after_they_parted():
    cache = DenseStore()
    cache.extend(1)
    feed(cache, 100)
    cache.commit(torch.tensor([0, 0]), torch.tensor([100, 100]))
    before = cache.copied_slots
    feed(cache, 1, start=100)
    cache.commit(torch.tensor([1, 0]), torch.tensor([101, 101]))
    assert cache.copied_slots - before == 2


def test_strangers_share_nothing():
    cache = DenseStore()
    cache.extend(2)
    feed(cache, 100)
    cache.commit(torch.tensor([1, 0]), torch.tensor([100, 100]))
    assert cache.copied_slots == 200


def test_rows_that_keep_their_place_move_nothing():
    cache = DenseStore()
    cache.extend(4)
    feed(cache, 9)
    cache.commit(None, torch.tensor([9, 7, 5, 0]))
    cache.commit(torch.tensor([0, 1, 2]), torch.tensor([9, 7, 5]))
    assert (cache.copied_slots, len(cache)) == (0, 3)


def test_a_row_that_was_never_fed_can_move():
    cache = DenseStore()
    cache.extend(3)
    feed(cache, 4)
    cache.commit(None, torch.tensor([4, 4, 4]))
    cache.extend(1)
    cache.commit(torch.tensor([3, 1, 2]), torch.tensor([0, 4, 4]))
    block, (keys, _) = feed(cache, 2, rows=[0])
    assert torch.equal(keys[0, :, :2], block[0])


@pytest.mark.parametrize("beams", [2, 4, 8])
@pytest.mark.parametrize(
    "method", [{}, {"do_sample": True, "seed": 1, "temperature": 2.0}], ids=["search", "sampling"]
)
def test_beams_never_move_their_prompt(tiny, beams, method):
    """What is copied does not grow with the prompt, but for the first fork's own rows."""
    one = tiny("llama")
    moved = {}
    for length in (16, 160):
        session = Session(one.model, cache=DenseStore())
        config = GenerationConfig(num_beams=beams, max_new_tokens=20, eos_token_id=None, **method)
        session.admit(Request(prompts(one.arch, [length], 3)[0], config))
        session.step()
        forked = session._tables.default.cache.copied_slots
        assert forked == (beams - 1) * length
        list(session.drain())
        moved[length] = session._tables.default.cache.copied_slots - forked
    assert max(moved.values()) <= beams * 20 * 20
    assert moved[160] <= 2 * moved[16] + beams * 20


def test_rows_of_requests_that_left_are_used_again(tiny):
    """A session in which one request follows another does not grow."""
    one = tiny("llama")
    session = Session(one.model)
    sizes = []
    for prompt in prompts(one.arch, [9] * 12, 4):
        session.admit(Request(prompt, GenerationConfig(max_new_tokens=5, num_beams=3)))
        list(session.drain())
        sizes.append(session._tables.default.cache.nbytes)
    assert len(session._tables.default.cache) == 0
    assert sizes[-1] == sizes[1]


def test_a_request_that_leaves_moves_one_row_at_the_most(tiny):
    one = tiny("llama")
    session = Session(one.model)
    numbers = session.admit(*(Request(text, GenerationConfig()) for text in prompts(one.arch, [6] * 8, 5)))
    session.step()
    before = session._tables.default.cache.copied_slots
    session.cancel(numbers[0])
    assert session._tables.default.cache.copied_slots - before == 6
    assert session._tables.default.rows.request.tolist() == [7, 1, 2, 3, 4, 5, 6]
