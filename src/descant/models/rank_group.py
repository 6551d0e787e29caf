"""The ranks of a tensor- or pipeline-parallel model: processes with parts of one model that choose alike.

Every exchange carries a signal: whether anybody has failed. A rank that fails sends it and leaves; the
others meet it at their next exchange, wherever that is, and raise.
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


# Every collective is of one size, so that a rank that fails need not know where the others are: the first
# number is the signal, and behind it there is room for what most steps have to say.
_BUFFER_SIZE = 256
_INT64_MIN = torch.iinfo(torch.long).min


class TorchRankGroup:
    """Processes that decode the same table, each with its part of the model; the first one's word counts."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self._process_group = group
        self._source_rank = dist.get_global_rank(group, 0)
        self._device = device  # where the group's collectives work

    def raise_if_failed(self) -> None:
        """Raise if any rank has failed."""
        self._all_reduce_max(torch.empty(0, dtype=torch.long))

    def abort(self) -> None:
        """Tell the others that this one goes no further."""
        self._exchange(self.rank + 1, torch.empty(0, dtype=torch.long))

    def broadcast(self, mine: Tensor) -> Tensor:
        """What the first rank holds: integers, of the same shape on all."""
        count = mine.numel()
        if count < _BUFFER_SIZE:
            said = self._all_reduce_max(
                mine.flatten() if self.rank == 0 else mine.new_full((count,), _INT64_MIN)
            )
        else:
            self.raise_if_failed()
            said = mine.to(self._device, copy=True).contiguous()
            dist.broadcast(said, src=self._source_rank, group=self._process_group)
        return said.view(mine.shape).to(mine.device)

    def any_rank(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self._all_reduce_max(torch.tensor([int(mine)])))

    def check_equal(self, name: str, mine: object, digest: int) -> None:
        """Raise on all ranks where what `name` names differs, as told by its digest."""
        high, low = self._all_reduce_max(torch.tensor([digest, -digest])).tolist()
        if high != -low:
            must = "must be the same on every rank of a tensor-parallel model, and so must lengths and beams"
            raise InputError(name, must, mine, "give every rank the same call")

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """No rank leaves the block alone: all come to its end, or all raise."""
        try:
            yield
        except RankError:
            raise  # all ranks know
        except Exception:
            self.abort()
            raise
        self.raise_if_failed()

    def _all_reduce_max(self, mine: Tensor) -> Tensor:
        """The highest that any rank has of each number; raises if any has failed."""
        shared = self._exchange(0, mine)
        failed = int(shared[0])
        if failed:
            raise RankError(failed - 1)
        return shared[1 : 1 + len(mine)]

    def _exchange(self, signal: int, mine: Tensor) -> Tensor:
        numbers = torch.full((_BUFFER_SIZE,), signal, device=self._device)
        numbers[1 : 1 + len(mine)] = mine
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._process_group)
        return numbers


_inside_block: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def all_ranks_or_none(model: Any) -> Iterator[None]:
    """A block that no rank of the model leaves alone; one inside another is part of it."""
    ranks = None if _inside_block.get() else rank_group_of(model)
    if ranks is None:
        yield
        return
    mark = _inside_block.set(True)
    try:
        with ranks.all_or_none():
            yield
    finally:
        _inside_block.reset(mark)


def rank_group_of(model: Any) -> TorchRankGroup | None:
    """The ranks that a model is shared among; None where it is whole in this process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if hasattr(model, "traits"):  # it is behind the port already
        ranks: TorchRankGroup | None = getattr(model, "rank_group", None)
        return ranks
    mesh = _model_mesh(model)
    if mesh is None:
        return None
    return TorchRankGroup(
        mesh.get_group(), torch.device("cpu") if mesh.device_type == "cpu" else model.device
    )


def _model_mesh(model: Any) -> Any:
    """The processes that hold the parts of one model: its layers cut across them, or dealt out to them."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None and isinstance(model, torch.nn.Module):  # cut by torch's own `parallelize_module`
        mesh = next((part.device_mesh for part in model.parameters() if hasattr(part, "device_mesh")), None)
    if mesh is None or not mesh.mesh_dim_names:
        return None
    axes = tuple(name for name in mesh.mesh_dim_names if name in ("pp", "tp") and mesh[name].size() > 1)
    return mesh[axes]._flatten() if len(axes) > 1 else mesh[axes[0]] if axes else None
