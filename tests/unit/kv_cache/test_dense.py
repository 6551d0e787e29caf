"""The dense cache beyond the law of caches: what it copies, and what it holds."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from descant import GenerationConfig, Request, Session
from descant.core.interfaces import KVSpan
from descant.kv_cache.stores.dense import DenseStore
from tests.support.tiny_models import prompts

HEADS, SIZE = 2, 3


def feed(cache, width, start=0):
    """Write `width` new positions of every row."""
    block = torch.randn(len(cache), HEADS, width, SIZE)
    cache.update(0, block, -block, KVSpan(None, start, width, start + width))


def num_slots(cache):
    """The slots of a cache with one row and one layer."""
    return cache.nbytes // (2 * HEADS * SIZE * torch.float32.itemsize)


def test_a_block_is_at_most_an_eighth_or_sixteen_slots_too_long():
    cache = DenseStore()
    cache.extend(1)
    for start in range(0, 1500, 5):
        feed(cache, 5, start=start)
        assert start + 5 <= num_slots(cache) <= start + 5 + max((start + 5) // 8, 16)


@pytest.mark.parametrize("expected", [40, 64, 95, 300, 1000])
def test_a_block_ends_at_the_expected_length_unless_a_row_does_not(expected):
    cache = DenseStore(expected)
    cache.extend(1)
    for start in range(expected):
        feed(cache, 1, start=start)
        assert start < num_slots(cache) <= min(expected, max(start + 65, (start + 1) * 9 // 8))
    assert num_slots(cache) == expected
    feed(cache, 1, start=expected)
    assert expected < num_slots(cache) <= expected + 1 + max(expected // 8, 16)


def test_a_prompt_has_no_spare_slots_until_a_token_follows():
    """The copy of a cache expects the same length."""
    cache = DenseStore(60)
    cache.extend(1)
    feed(cache, 30)
    assert num_slots(cache) == 30
    cache.commit(None, torch.tensor([30]))
    for one in (cache, cache.select(torch.tensor([0]))):
        feed(one, 1, start=30)
        assert num_slots(one) == 60


class LiveBlocks(TorchDispatchMode):
    """The most bytes of blocks that were alive at once."""

    def __init__(self):
        super().__init__()
        self.blocks, self.peak = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_zeros.default:
            self.blocks.append(weakref.ref(made))
            self.peak = max(self.peak, sum(block().nbytes for block in self.blocks if block() is not None))
        return made


def test_a_cache_grows_layer_by_layer():
    layers, cache = 8, DenseStore(128)
    cache.extend(4)
    with LiveBlocks() as live:
        for start in range(0, 128, 16):
            part = torch.zeros(4, HEADS, 16, SIZE)
            span = KVSpan(None, start, 16, start + 16)
            for layer in range(layers):
                cache.update(layer, part, part, span)
    whole = layers * 2 * 4 * HEADS * 128 * SIZE * 4
    assert cache.nbytes == whole
    assert whole < live.peak <= whole + whole // layers


@pytest.mark.parametrize(("length", "new"), [(32, 32), (20, 300)])
def test_requests_take_no_more_than_their_rows_can_need(tiny, length, new):
    one, largest = tiny("llama"), 0
    session, config = Session(one.model), GenerationConfig(max_new_tokens=new, min_new_tokens=new)
    session.admit(*(Request(prompt, config) for prompt in prompts(one.arch, [length] * 3, 5)))
    while len(session):
        session.step()
        largest = max(largest, session.report().cache_bytes)
    shape = one.model.config
    slot = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4
    assert largest == 3 * (length + new - 1) * slot


COPIES = {  # rows, then by commit: the parents, the length of the rows, and the slots copied so far
    "a fork copies the new rows and not the old one": (1, [([0, 0, 0], 5, 10)]),
    "kin copy what came after they parted": (1, [([0, 0], 100, 100), ([1, 0], 101, 102)]),
    "strangers share nothing": (2, [([1, 0], 100, 200)]),
    "rows that stay in their place move nothing": (4, [(None, 9, 0), ([0, 1, 2], 9, 0)]),
}


@pytest.mark.parametrize("case", COPIES)
def test_slots_that_are_copied(case):
    rows, commits = COPIES[case]
    cache, start = DenseStore(), 0
    cache.extend(rows)
    for parents, length, copied in commits:
        if length > start:
            feed(cache, length - start, start=start)
        index = None if parents is None else torch.tensor(parents)
        cache.commit(index, torch.full((rows if parents is None else len(parents),), length))
        assert cache.copied_slots == copied
        start = length


def test_one_row_more_doubles_the_memory():
    cache = DenseStore()
    cache.extend(3)
    feed(cache, 5)
    before = cache.nbytes
    cache.commit(torch.tensor([0, 1, 2, 0]), torch.tensor([5, 5, 5, 5]))
    assert cache.nbytes == 2 * before


@pytest.mark.parametrize(
    "method", [{}, {"do_sample": True, "seed": 1, "temperature": 2.0}], ids=["search", "sampling"]
)
def test_beams_never_move_their_prompt(tiny, method):
    """What is copied does not grow with the prompt, but for the first fork's own rows."""
    one, beams = tiny("llama"), 4
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


def test_a_request_that_leaves_moves_one_row_at_the_most(tiny):
    one = tiny("llama")
    session = Session(one.model)
    numbers = session.admit(*(Request(text, GenerationConfig()) for text in prompts(one.arch, [6] * 8, 5)))
    session.step()
    before = session._tables.default.cache.copied_slots
    session.cancel(numbers[0])
    assert session._tables.default.cache.copied_slots - before == 6
    assert session._tables.default.rows.request.tolist() == [7, 1, 2, 3, 4, 5, 6]
