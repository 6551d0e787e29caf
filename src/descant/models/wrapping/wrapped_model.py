"""The model inside the wrappers of other libraries: PEFT, torch.compile, DataParallel, FSDP, DeepSpeed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from descant.errors import UnsupportedModel


def unwrap_model(model: Any) -> Any:
    """The transformers model inside all wrappers; what is not wrapped is returned as it is.

    Adapters of PEFT are layers of that model, so they stay. A model of `torch.compile` runs as it was before,
    as in transformers: its graphs know no cache of Descant.
    """
    while isinstance(model, nn.Module) and (inner := _inner_model(model)) is not None:
        if _wrapper_kind(type(model)) == "fsdp":
            raise UnsupportedModel(
                f"{type(inner).__name__} is inside FullyShardedDataParallel, which gathers its weights for "
                "one call: use descant.generate or attach, or shard it with torch's fully_shard"
            )
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
    inner_model = _inner_model(model) if isinstance(model, nn.Module) else None
    if inner_model is None:
        yield model
        return
    weights: AbstractContextManager[Any] = nullcontext()
    if _wrapper_kind(type(model)) == "fsdp":
        fsdp: Any = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
        # Wrapped layers gather their own weights; those of the root are gathered by its forward alone.
        weights = fsdp.summon_full_params(model, recurse=False, writeback=False)
    with weights, gathered_model(inner_model) as inner:
        yield inner


def _inner_model(model: nn.Module) -> Any:
    """The model inside a wrapper; None: it is no wrapper."""
    if "_orig_mod" in model._modules:  # torch.compile
        return model._modules["_orig_mod"]
    kind = _wrapper_kind(type(model))
    if kind == "peft":
        return _peft_base(model)
    return None if kind is None else model.model if kind == "tuner" else model.module


# Kind, module and name of the classes of other libraries that wrap a model.
_WRAPPERS: Final = (
    ("peft", "peft", "PeftModel"),
    ("tuner", "peft.tuners.tuners_utils", "BaseTuner"),
    ("parallel", "torch.nn", "DataParallel"),
    ("parallel", "torch.nn.parallel", "DistributedDataParallel"),
    ("fsdp", "torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "deepspeed", "DeepSpeedEngine"),
)
_wrapper_kinds: Final[WeakKeyDictionary[type, str | None]] = WeakKeyDictionary()


def _wrapper_kind(model_class: type) -> str | None:
    """The kind of wrapper that a class is; None: none. A library that is not imported has no subclasses."""
    if model_class not in _wrapper_kinds:
        classes = [(kind, getattr(sys.modules.get(module), name, None)) for kind, module, name in _WRAPPERS]
        kinds = (kind for kind, base in classes if isinstance(base, type) and issubclass(model_class, base))
        _wrapper_kinds[model_class] = next(kinds, None)
    return _wrapper_kinds[model_class]


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
    return next(
        (method for method in methods if method is not None and not hasattr(method, "runs_descant")), None
    )


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


# Tables of a module that a forward may write to: hooks that record states, and frequencies that grow.
_WRITTEN_TABLES = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_buffers")


def with_eager_attention(model: Any) -> Any:
    """The model itself if it returns attention weights, else a copy of its modules that does.

    Other implementations do not compute the weights. The copy shares all parameters and buffers and has its
    own configs, so the model is not changed. A model that cannot switch is returned as it is.
    """
    config = getattr(model, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if not isinstance(model, nn.Module) or current in (None, "eager"):
        return model
    untyped: Any = type(model)
    if not getattr(untyped, "_can_set_attn_implementation", bool)():
        return model
    return _copy_eager(model, {}, {})


def _copy_eager(module: nn.Module, copies: dict[int, Any], configs: dict[int, Any]) -> Any:
    """A copy of a module and all below it; `configs` is the memo of deepcopy, for configs that are shared."""
    if id(module) in copies:
        return copies[id(module)]
    view = copies[id(module)] = shallow_copy(module)
    for name in _WRITTEN_TABLES:
        if name in vars(view):
            vars(view)[name] = copy.copy(vars(view)[name])
    config = vars(view).get("config")
    if hasattr(config, "_attn_implementation"):
        vars(view)["config"] = config = copy.deepcopy(config, configs)
        config._attn_implementation = "eager"
    if isinstance(vars(view).get("_attn_implementation"), str):
        vars(view)["_attn_implementation"] = "eager"
    for name, part in view._modules.items():
        if part is not None:
            view._modules[name] = _copy_eager(part, copies, configs)
    return view
