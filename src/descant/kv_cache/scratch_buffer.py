"""Reusable host memory for tensors that one layer's attention reads once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from math import prod

import numpy as np
import torch
from torch import Tensor

from descant.core.interfaces import Array

__all__ = ["ScratchBuffer"]


class ScratchBuffer:
    """Host memory that is reused once the last tensor on it is gone.

    Large tensors come on fresh pages, and faulting pages in costs more than filling them. On other devices
    torch's own allocator reuses memory.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._in_use: dict[int, tuple[weakref.ref[Array], Array]] = {}
        self._next_id = count()

    @property
    def nbytes(self) -> int:
        """The bytes in use and free."""
        in_use = sum(array.nbytes for _, array in self._in_use.values())
        return in_use + sum(array.nbytes for array in self._free)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised tensor of that shape, with the dtype and device of `like`."""
        size = prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        array = next((free for free in self._free if free.nbytes >= size), None)
        if array is None:
            self._free.clear()  # all too small from now on
            array = np.empty(size, dtype=np.uint8)
        else:
            self._free = [free for free in self._free if free is not array]
        view, number = array[:size], next(self._next_id)
        # The tensor's storage owns the view, so the view dies with the last tensor on it.
        self._in_use[number] = weakref.ref(view, lambda _: self._release(number)), array
        return torch.from_numpy(view).view(like.dtype).view(*shape)

    def clear(self) -> None:
        """Drop all memory; what is in use is freed with its tensors."""
        self._free, self._in_use = [], {}

    def _release(self, number: int) -> None:
        if number in self._in_use:
            self._free.append(self._in_use.pop(number)[1])
