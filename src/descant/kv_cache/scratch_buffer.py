"""Scratch memory: for what a layer's attention reads once."""

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
    """Memory on the host that is lent for a tensor and lent again as soon as nobody holds that.

    Pages that are new to a process cost more than to fill them, and large tensors come on new pages. On other
    devices torch itself keeps what is freed.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._in_use: dict[int, tuple[weakref.ref[Array], Array]] = {}
        self._next_id = count()

    @property
    def nbytes(self) -> int:
        """What is lent or could be."""
        return sum(one.nbytes for one in self._free) + sum(one.nbytes for _, one in self._in_use.values())

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of that shape, with anything in it, of the dtype and on the device of another."""
        size = prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        array = next((one for one in self._free if one.nbytes >= size), None)
        if array is None:
            self._free.clear()  # too small for what is read now
            array = np.empty(size, dtype=np.uint8)
        else:
            self._free = [one for one in self._free if one is not array]
        view, number = array[:size], next(self._next_id)
        # The tensor's storage is what holds the view, so that it ends with the last tensor upon it.
        self._in_use[number] = weakref.ref(view, lambda _: self._release(number)), array
        return torch.from_numpy(view).view(like.dtype).view(*shape)

    def clear(self) -> None:
        """Keep nothing; what is lent goes when it is done with."""
        self._free, self._in_use = [], {}

    def _release(self, number: int) -> None:
        if number in self._in_use:
            self._free.append(self._in_use.pop(number)[1])
