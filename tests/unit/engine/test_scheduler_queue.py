"""The sorted queue of the scheduler against a sorted list, and its cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from descant.engine.scheduling.ageing_scheduler import RequestQueue


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=200))
def test_it_equals_a_sorted_list(calls):
    queue, keys = RequestQueue(), {}
    for number, key in calls:
        if number in keys:
            queue.discard(number)
            del keys[number]
        else:
            queue.add(number, float(key))
            keys[number] = float(key)
        expected = min(((key, number) for number, key in keys.items()), default=None)
        assert queue.first() == expected
        assert len(queue) == len(keys)
        assert all((number in queue) == (number in keys) for number in range(13))


def test_a_request_may_come_back_with_another_key():
    queue = RequestQueue()
    queue.add(0, 1.0)
    queue.add(1, 0.0)
    queue.discard(0)  # behind the first, so its old entry stays for now
    queue.add(0, 2.0)
    queue.discard(1)
    assert queue.first() == (2.0, 0)


def test_removed_requests_take_no_memory_for_long():
    queue = RequestQueue()
    queue.add(0, -1.0)
    for number in range(1, 20_000):
        queue.add(number, float(number))
        queue.discard(number)
        assert len(queue._heap) <= 66
    queue.discard(7)
    assert queue.first() == (-1.0, 0)


def test_the_order_survives_the_removal_of_most():
    queue = RequestQueue()
    keys = {number: float((37 * number) % 251) for number in range(251)}
    for number, key in keys.items():
        queue.add(number, key)
    for number in range(180):
        queue.discard(number)
        assert len(queue._heap) <= 2 * len(queue)
    left = sorted((key, number) for number, key in keys.items() if number >= 180)
    drained = []
    while (first := queue.first()) is not None:
        drained.append(first)
        queue.discard(first[1])
    assert drained == left
