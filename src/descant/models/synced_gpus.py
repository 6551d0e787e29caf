"""`synced_gpus`: processes that shard weights but have their own prompts (FSDP, ZeRO-3).

A forward gathers weights from all processes, so a process that has finished must keep running dummy forwards
until all have finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from descant.errors import InputError, UnsupportedModel
from descant.models.devices import input_device
from descant.models.rank_group import all_ranks_or_none

__all__ = ["ForwardBarrier", "current_barrier", "synchronized_processes"]


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
            _dummy_forward(model)

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


def _dummy_forward(model: Any) -> None:
    """A forward of one token, without a cache."""
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
