"""Copies from a device to the host for which later work of the device is not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_WITH_STREAMS = ("cuda", "xpu")


class HostCopy:
    """A copy of tensors of one device to the host, begun when it is made.

    `wait` returns when they have arrived, whatever was launched since. A device without streams copies in
    `wait`.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors: Sequence[Tensor] = tensors
        self._event: Any = None
        device = tensors[0].device
        if device.type in _WITH_STREAMS:
            targets = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            self._tensors = [
                target.copy_(tensor, non_blocking=True)
                for target, tensor in zip(targets, tensors, strict=True)
            ]
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self._event is None:
            return [tensor.cpu() for tensor in self._tensors]
        self._event.synchronize()
        return list(self._tensors)
