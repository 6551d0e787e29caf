"""A view of a model that computes attention eagerly, for calls that return attention weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from descant.models.wrapping.wrapped_model import shallow_copy

__all__ = ["with_eager_attention"]

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
