"""Scratch memory is reused when no tensor refers to it, and never before."""

from __future__ import annotations

import pytest
import torch

from descant.kv_cache.stores.quantized import ScratchBuffer

LIKE = torch.zeros(1)


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def test_unreferenced_memory_is_reused():
    scratch = ScratchBuffer()
    first = scratch.empty((2, 3, 4), LIKE)
    where = place(first)
    first.fill_(7)
    view = first.transpose(0, 1)[1:]
    del first
    second = scratch.empty((2, 3, 4), LIKE).fill_(8)  # a view of the first still exists
    assert place(second) != where
    assert (view == 7).all()
    del view
    third = scratch.empty((5,), LIKE)
    assert place(third) == where
    assert third.shape == (5,)
    assert (second == 8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype(dtype):
    found = ScratchBuffer().empty((3, 5), LIKE.to(dtype))
    assert (found.shape, found.dtype) == ((3, 5), dtype)
    assert (found.fill_(2) == 2).all()


def test_what_is_kept_is_counted_until_it_is_cleared():
    scratch = ScratchBuffer()
    first, second = scratch.empty((256,), LIKE), scratch.empty((256,), LIKE)
    assert scratch.nbytes == 2048
    del first
    assert scratch.nbytes == 2048
    scratch.clear()
    assert scratch.nbytes == 0
    second.fill_(3)
    del second
    assert scratch.nbytes == 0  # what was lent before went with its tensor


def test_pieces_too_small_are_let_go():
    scratch = ScratchBuffer()
    for size in (10, 100, 1000):
        del_me = scratch.empty((size,), LIKE)
        del del_me
    assert scratch.nbytes == 4000


def test_nothing_and_other_devices_are_not_lent():
    scratch = ScratchBuffer()
    assert scratch.empty((2, 0), LIKE).shape == (2, 0)
    assert scratch.empty((2, 3), torch.zeros(1, device="meta")).device.type == "meta"
    assert scratch.nbytes == 0
