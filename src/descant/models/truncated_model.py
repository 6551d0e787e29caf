"""The first layers of a model as a model of its own, with shared weights (early exit)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from descant.errors import UnsupportedModel
from descant.models.forward.traits import traits_of
from descant.models.wrapping.wrapped_model import shallow_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Attributes under which modules store their number of layers, besides their config.
_LAYER_COUNT_ATTRS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def truncate_model(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model that runs the first `layers` decoder layers, then the final norm and the head.

    Modules on the path to the layers are shallow copies; all weights are shared. The model and its config are
    not changed.
    """
    depth = traits_of(model).num_layers
    paths = _layer_list_paths(model, depth)
    if not paths:
        raise UnsupportedModel(
            f"{type(model).__name__} has no ModuleList of its {depth} layers, so early exit cannot skip any: "
            "leave out early exit"
        )
    configs: dict[int, Any] = {}  # memo of deepcopy, so that nested configs stay nested
    truncated = _copy_with_layers(model, depth, layers, configs)
    views: dict[str, Any] = {"": truncated}
    for path in paths:
        *parents, list_name = path.split(".")
        parent = truncated
        for index, name in enumerate(parents):
            key = ".".join(parents[: index + 1])
            if key not in views:
                views[key] = parent._modules[name] = _copy_with_layers(
                    parent._modules[name], depth, layers, configs
                )
            parent = views[key]
        stack: Any = shallow_copy(parent._modules[list_name])
        stack._modules = dict(list(stack._modules.items())[:layers])
        parent._modules[list_name] = stack
    for view in views.values():
        for name, part in view._modules.items():
            # A module without weights may keep state of its calls (rotary frequencies that grow with length).
            if part is not None and not any(True for _ in part.parameters()):
                view._modules[name] = copy.deepcopy(part)
    result: PreTrainedModel = truncated
    return result


def _layer_list_paths(model: PreTrainedModel, depth: int) -> list[str]:
    """Paths of the outermost ModuleLists with one entry per decoder layer."""
    untyped: Any = model
    decoder = untyped.get_decoder() if hasattr(model, "get_decoder") else None
    root = untyped if decoder is None else decoder
    prefix = next((path for path, part in model.named_modules() if part is root), "")
    paths: list[str] = []
    for path, part in root.named_modules():
        nested = any(path.startswith(f"{other}.") for other in paths)
        if path and not nested and isinstance(part, nn.ModuleList) and len(part) == depth:
            paths.append(path)
    return [f"{prefix}.{path}" if prefix else path for path in paths]


def _copy_with_layers(module: nn.Module, depth: int, layers: int, configs: dict[int, Any]) -> Any:
    """A shallow copy of a module whose layer counts and config say `layers` instead of `depth`."""
    view = shallow_copy(module)
    for name in _LAYER_COUNT_ATTRS:
        if vars(view).get(name) == depth:
            vars(view)[name] = layers
    config = vars(view).get("config")
    if config is not None:
        vars(view)["config"] = config = copy.deepcopy(config, configs)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = layers
        for name, value in list(vars(text).items()):
            if isinstance(value, list | tuple) and len(value) == depth:
                setattr(text, name, value[:layers])
    return view
