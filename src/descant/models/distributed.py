"""The ranks of a tensor- or pipeline-parallel model, which must make the same decisions.

Every exchange carries a failure signal. A rank that fails sends it and stops; the others receive it at their
next exchange and raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from descant.errors import InputError, RankError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


class ForwardBarrier:
    """Keeps the forwards of all processes in step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device  # of the collectives

    def announce_forward(self) -> None:
        """Signal that this process is about to run a forward."""
        self._any_active(True)

    def drain(self, model: Any) -> None:
        """Run dummy forwards until all processes have finished."""
        while self._any_active(False):
            token = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
            model(input_ids=token, use_cache=False)

    def _any_active(self, active: bool) -> bool:
        """Whether any process is active."""
        flag = torch.tensor([int(active)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


_current_barrier: ContextVar[ForwardBarrier | None] = ContextVar("forward_barrier", default=None)


def current_barrier() -> ForwardBarrier | None:
    """The barrier of the current call, None if it has none."""
    return _current_barrier.get()


@contextmanager
def forward_barrier(model: Any, synced_gpus: bool | None) -> Iterator[None]:
    """A block whose forwards are in step with all other processes; None: if the model needs it."""
    if synced_gpus and not (dist.is_available() and dist.is_initialized()):
        do = "leave it out, or start with torchrun and torch.distributed.init_process_group"
        raise InputError("synced_gpus", "needs torch.distributed to be initialised", synced_gpus, do)
    if _current_barrier.get() is not None or not (
        _needs_barrier(model) if synced_gpus is None else synced_gpus
    ):
        yield
        return
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{type(model).__name__} has an encoder, whose weights are not gathered when it runs alone: "
            "use FSDP and ZeRO-3 with decoder-only models"
        )
    barrier = ForwardBarrier(torch.device("cpu") if "gloo" in dist.get_backend() else input_device(model))
    token = _current_barrier.set(barrier)
    try:
        yield
    finally:  # also on failure: the other processes would wait forever
        _current_barrier.reset(token)
        with torch.no_grad():
            barrier.drain(model)


@contextmanager
def synchronized_processes(model: Any, synced_gpus: bool | None = None) -> Iterator[None]:
    """A block that runs in step with all processes that share the model."""
    if synced_gpus is None and not (dist.is_available() and dist.is_initialized()):
        yield
        return
    with forward_barrier(model, synced_gpus), all_ranks_or_none(model):
        yield


def _needs_barrier(model: Any) -> bool:
    """Whether every forward of a model gathers weights from all processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    is_module = isinstance(model, torch.nn.Module)
    return is_module and bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))  # type: ignore[no-untyped-call]


def input_device(model: PreTrainedModel) -> torch.device:
    """The device on which a model expects its inputs: that of its input embeddings."""
    return _execution_device(_input_embeddings(model)) or torch.device(model.device)


def is_multi_device(model: PreTrainedModel) -> bool:
    """Whether a model computes on several devices, by its `device_map` or its input and output embeddings."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return True
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {_execution_device(_input_embeddings(model)), _execution_device(head)} - {None}
    return len(ends) > 1


def _input_embeddings(model: PreTrainedModel) -> Any:
    """The input embeddings of a model, None if it declares none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _execution_device(module: Any) -> torch.device | None:
    """The device on which a module computes: that of its accelerate hook, if any, else of its weights."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return None if weight is None else weight.device
