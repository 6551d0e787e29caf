"""The model inside the wrappers of other libraries: PEFT, torch.compile, DataParallel, FSDP, DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from descant.errors import UnsupportedModel

__all__ = ["eager_call", "gathered_model", "unwrap_model"]


def unwrap_model(model: Any) -> Any:
    """The transformers model inside all wrappers; what is not wrapped is returned as it is.

    Adapters of PEFT are layers of that model, so they stay. A model of `torch.compile` runs as it was before,
    as in transformers: its graphs know no cache of Descant.
    """
    while isinstance(model, nn.Module):
        if _is_instance(model, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            name = type(_inner_model(model)).__name__
            raise UnsupportedModel(
                f"{name} is inside FullyShardedDataParallel, which gathers its weights for one call: use "
                "descant.generate or attach, or shard it with torch's fully_shard"
            )
        inner = _inner_model(model)
        if inner is None:
            return model
        model = inner
    return model


def eager_call(model: Any) -> Callable[..., Any]:
    """The call of a model, not compiled also after `model.compile()`.

    torch would compile it again for almost every shape and cache of a step.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    call: Callable[..., Any] = model if compiled is None else model._call_impl
    return call


@contextmanager
def gathered_model(model: Any) -> Iterator[Any]:
    """The transformers model inside all wrappers, with the weights that only a root of FSDP gathers."""
    if not isinstance(model, nn.Module):
        yield model
        return
    if _is_instance(model, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        fsdp: Any = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
        # Wrapped layers gather their own weights; those of the root are gathered by its forward alone.
        with (
            fsdp.summon_full_params(model, recurse=False, writeback=False),
            gathered_model(model.module) as inner,
        ):
            yield inner
        return
    inner_model = _inner_model(model)
    if inner_model is None:
        yield model
        return
    with gathered_model(inner_model) as inner:
        yield inner


def _inner_model(model: nn.Module) -> Any:
    """What a wrapper is around; None: it is no wrapper."""
    if "_orig_mod" in model._modules:  # torch.compile
        return model._modules["_orig_mod"]
    if _is_instance(model, "peft", "PeftModel"):
        return _peft_base(model)
    if _is_instance(model, "peft.tuners.tuners_utils", "BaseTuner"):
        return model.model
    has_module = (
        isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        or _is_instance(model, "torch.distributed.fsdp", "FullyShardedDataParallel")
        or _is_instance(model, "deepspeed", "DeepSpeedEngine")
    )
    return model.module if has_module else None


def _is_instance(model: nn.Module, module: str, name: str) -> bool:
    """Whether a model is of a class of a library; a library that is not imported has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(model, kind)


def _peft_base(model: Any) -> Any:
    """The model inside PEFT's, with the adapters in its layers."""
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise UnsupportedModel(
            f"{type(model.base_model).__name__} has a learned prompt of PEFT ({config.peft_type.value}), "
            "which is no layer of the model and is not supported: use an adapter in the layers, such as LoRA"
        )
    return model.get_base_model()
