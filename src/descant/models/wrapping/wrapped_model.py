"""The model inside the wrappers of other libraries: PEFT, torch.compile, DataParallel, FSDP, DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any

from torch import nn

from descant.errors import UnsupportedModel

__all__ = [
    "ATTACHED_METHODS",
    "decoding_base",
    "derived_class",
    "eager_call",
    "gathered_model",
    "own_method",
    "shallow_copy",
    "unwrap_model",
]


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


ATTACHED_METHODS = ("generate", "compute_transition_scores")  # set by `attach`, and bound to the original


def shallow_copy(module: nn.Module, cls: type | None = None, **attributes: Any) -> Any:
    """A copy of `module` that shares its weights and submodules but not its attributes."""
    view: Any = object.__new__(cls or type(module))
    own = {name: value for name, value in vars(module).items() if name not in ATTACHED_METHODS}
    vars(view).update(own)
    for name, value in own.items():
        # accelerate wraps the methods of a module and binds them to it; bind them to the copy instead.
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(view)[name] = MethodType(value.__func__, view)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            vars(view)[name] = partial(value.func, view, *value.args[1:], **value.keywords)
    vars(view).update(attributes, _modules=dict(module._modules))
    return view


def own_method(model_class: type, name: str) -> Any:
    """A method of a class, without that of Descant's mixin; None: it has none."""
    methods = (vars(base).get(name) for base in model_class.__mro__)
    return next((one for one in methods if one is not None and not hasattr(one, "runs_descant")), None)


def decoding_base(model_class: type, names: Container[str], methods: Iterable[str]) -> str | None:
    """The first of these classes of transformers that a model class is or inherits from.

    None: there is none, or the class overrides one of the methods that decide how it decodes, and so is
    another model.
    """
    for base in model_class.__mro__:
        if base.__name__ in names and base.__module__.startswith("transformers.models."):
            is_same = all(own_method(model_class, name) is own_method(base, name) for name in methods)
            return base.__name__ if is_same else None
    return None


@cache
def derived_class(model_class: type, *bases: type) -> type:
    """A class with these bases under the name of a model class, which is one of them."""
    attributes = {"__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, bases, attributes)
