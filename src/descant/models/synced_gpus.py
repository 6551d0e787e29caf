"""The pace of processes that share weights but not prompts (FSDP, ZeRO-3): every forward is everybody's.

Weights are gathered for a forward by all processes at once, so that one which has nothing left to feed must
go on feeding something until all have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from descant.errors import InputError, UnsupportedModel
from descant.models.devices import input_device
from descant.models.rank_group import all_ranks_or_none

__all__ = ["ForwardBarrier", "current_barrier", "synchronize_processes"]

CallParams = ParamSpec("CallParams")
CallResult = TypeVar("CallResult")


class ForwardBarrier:
    """Counts forwards together: nobody begins one while another process does something else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device  # where collectives work

    def announce_forward(self) -> None:
        """Say that this process is about to feed its model."""
        self._any_active(True)

    def drain(self, model: Any) -> None:
        """Feed the model next to nothing until no process has anything to feed."""
        while self._any_active(False):
            _dummy_forward(model)

    def _any_active(self, mine: bool) -> bool:
        going = torch.tensor([int(mine)], device=self._device)
        dist.all_reduce(going, dist.ReduceOp.MAX)
        return bool(going)


_current_barrier: ContextVar[ForwardBarrier | None] = ContextVar("pace", default=None)


def current_barrier() -> ForwardBarrier | None:
    """The pace of the call under way, if it has one."""
    return _current_barrier.get()


@contextmanager
def forward_barrier(model: Any, asked: bool | None) -> Iterator[None]:
    """A block whose forwards are in step with all other processes, if asked for or None and needed."""
    if asked and not (dist.is_available() and dist.is_initialized()):
        do = "leave it out, or start with torchrun and torch.distributed.init_process_group"
        raise InputError("synced_gpus", "needs torch.distributed to be initialised", asked, do)
    if _current_barrier.get() is not None or not (_needs_barrier(model) if asked is None else asked):
        yield
        return
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{type(model).__name__} has an encoder, whose weights are not gathered when it runs alone: "
            "FSDP and ZeRO-3 are for decoder-only models"
        )
    pace = ForwardBarrier(torch.device("cpu") if "gloo" in dist.get_backend() else input_device(model))
    mark = _current_barrier.set(pace)
    try:
        yield
    finally:  # also where this process fails: the others could not go on without it
        _current_barrier.reset(mark)
        with torch.no_grad():
            pace.drain(model)


def synchronize_processes(call: Callable[CallParams, CallResult]) -> Callable[CallParams, CallResult]:
    """A call on a model, its first argument, in step with all processes that share the model."""

    @wraps(call)
    def run(*args: CallParams.args, **kwargs: CallParams.kwargs) -> CallResult:
        model, asked = args[0] if args else kwargs.get("model"), kwargs.pop("synced_gpus", None)
        with forward_barrier(model, cast("bool | None", asked)), all_ranks_or_none(model):
            return call(*args, **kwargs)

    return run


def _needs_barrier(model: Any) -> bool:
    """Whether the weights of a model are gathered from all processes for every forward."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    whole = isinstance(model, torch.nn.Module)
    return whole and bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))  # type: ignore[no-untyped-call]


def _dummy_forward(model: Any) -> None:
    """One forward of one token, of which nothing is kept."""
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
