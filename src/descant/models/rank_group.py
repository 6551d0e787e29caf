"""The ranks of a tensor- or pipeline-parallel model, which must make the same decisions.

Every exchange carries a failure signal. A rank that fails sends it and stops; the others receive it at their
next exchange and raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from descant.errors import InputError, RankError

__all__ = ["TorchRankGroup", "all_ranks_or_none", "rank_group_of"]


# All collectives have one size, so that a failing rank need not know which exchange the others are in. The
# first value is the failure signal; the rest is payload, enough for most steps.
_BUFFER_SIZE = 256
_INT64_MIN = torch.iinfo(torch.long).min


class TorchRankGroup:
    """Processes that decode the same rows, each with its part of the model; rank 0 decides."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self._process_group = group
        self._source_rank = dist.get_global_rank(group, 0)
        self._device = device  # of the group's collectives

    def raise_if_failed(self) -> None:
        """Raise if any rank has failed."""
        self._all_reduce_max(torch.empty(0, dtype=torch.long))

    def abort(self) -> None:
        """Signal the other ranks that this one has failed."""
        self._exchange(self.rank + 1, torch.empty(0, dtype=torch.long))

    def broadcast(self, mine: Tensor) -> Tensor:
        """The values of rank 0: integers, of the same shape on all ranks."""
        count = mine.numel()
        if count < _BUFFER_SIZE:
            received = self._all_reduce_max(
                mine.flatten() if self.rank == 0 else mine.new_full((count,), _INT64_MIN)
            )
        else:
            self.raise_if_failed()
            received = mine.to(self._device, copy=True).contiguous()
            dist.broadcast(received, src=self._source_rank, group=self._process_group)
        return received.view(mine.shape).to(mine.device)

    def any_rank(self, mine: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self._all_reduce_max(torch.tensor([int(mine)])))

    def check_equal(self, name: str, mine: object, digest: int) -> None:
        """Raise on all ranks if the digest of `mine`, the argument `name`, differs between them."""
        high, low = self._all_reduce_max(torch.tensor([digest, -digest])).tolist()
        if high != -low:
            must = "must be the same on every rank of a tensor-parallel model, and so must lengths and beams"
            raise InputError(name, must, mine, "make the same call on every rank")

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block that all ranks complete, or in which all raise."""
        try:
            yield
        except RankError:
            raise  # all ranks raise it
        except Exception:
            self.abort()
            raise
        self.raise_if_failed()

    def _all_reduce_max(self, values: Tensor) -> Tensor:
        """The maximum of each value over all ranks; raises if any rank has failed."""
        buffer = self._exchange(0, values)
        failed = int(buffer[0])
        if failed:
            raise RankError(failed - 1)
        return buffer[1 : 1 + len(values)]

    def _exchange(self, signal: int, values: Tensor) -> Tensor:
        buffer = torch.full((_BUFFER_SIZE,), signal, device=self._device)
        buffer[1 : 1 + len(values)] = values
        dist.all_reduce(buffer, dist.ReduceOp.MAX, group=self._process_group)
        return buffer


_inside_block: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def all_ranks_or_none(model: Any) -> Iterator[None]:
    """A block that all ranks of a model complete, or in which all raise; nested blocks join the outer one."""
    group = None if _inside_block.get() else rank_group_of(model)
    if group is None:
        yield
        return
    token = _inside_block.set(True)
    try:
        with group.all_or_none():
            yield
    finally:
        _inside_block.reset(token)


def rank_group_of(model: Any) -> TorchRankGroup | None:
    """The ranks over which a model is split; None if it is whole in this process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if hasattr(model, "traits"):  # an adapted model knows its group
        group: TorchRankGroup | None = getattr(model, "rank_group", None)
        return group
    mesh = _model_mesh(model)
    if mesh is None:
        return None
    return TorchRankGroup(
        mesh.get_group(), torch.device("cpu") if mesh.device_type == "cpu" else model.device
    )


def _model_mesh(model: Any) -> Any:
    """The device mesh of a model's tensor- and pipeline-parallel ranks, None if it has none."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None and isinstance(model, torch.nn.Module):  # split by torch's `parallelize_module`
        mesh = next(
            (weight.device_mesh for weight in model.parameters() if hasattr(weight, "device_mesh")), None
        )
    if mesh is None or not mesh.mesh_dim_names:
        return None
    axes = tuple(name for name in mesh.mesh_dim_names if name in ("pp", "tp") and mesh[name].size() > 1)
    return mesh[axes]._flatten() if len(axes) > 1 else mesh[axes[0]] if axes else None
