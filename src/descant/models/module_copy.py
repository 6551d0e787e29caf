"""Shallow copies of modules: same weights, attributes that can be changed independently."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["ATTACHED_METHODS", "shallow_copy"]

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
