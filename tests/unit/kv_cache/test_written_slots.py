"""What rows of a block may hold is cleared when another row takes their place, however it was noted."""

from __future__ import annotations

import numpy as np
import torch

from descant.kv_cache.written_slots import WrittenSlots


def cleared(written: WrittenSlots, row: int, start: int = 0) -> list[int]:
    """The slots of a row that are zero after `clear` of a block of ones [4, 1, 6, 1]."""
    block = torch.ones(4, 1, 6, 1)
    written.clear([block], np.array([row]), np.array([start]))
    others = [other for other in range(4) if other != row]
    assert block[others].all()
    return (block[row, 0, :, 0] == 0).nonzero().squeeze(1).tolist()


def test_the_first_rows_are_written_up_to_the_furthest_stop():
    written = WrittenSlots()
    for stop in (2, 5, 4):
        written.mark_first(3, stop)
    assert cleared(written, 0, 1) == [1, 2, 3, 4]
    assert cleared(written, 2) == [0, 1, 2, 3, 4]
    assert cleared(written, 3) == []


def test_fewer_rows_leave_what_more_rows_have_written():
    written = WrittenSlots()
    written.mark_first(3, 2)
    written.mark_first(1, 4)
    assert [cleared(written, row) for row in range(3)] == [[0, 1, 2, 3], [0, 1], [0, 1]]


def test_rows_by_index_and_first_rows_are_noted_together():
    written = WrittenSlots()
    written.mark_first(2, 3)
    written.mark(np.array([1, 2]), np.array([5, 1]))
    assert [cleared(written, row) for row in range(3)] == [[0, 1, 2], [0, 1, 2, 3, 4], [0]]


def test_what_is_before_the_start_of_a_clear_counts_as_written():
    written = WrittenSlots()
    assert cleared(written, 1, 3) == []
    assert cleared(written, 1, 1) == [1, 2]
    assert cleared(written, 1, 1) == []
