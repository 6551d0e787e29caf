"""The first layers of a model as a model: the same weights, the rest left out."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from descant.errors import UnsupportedModel
from descant.models.traits import traits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["truncate_model"]

# Under which names modules count their layers beside their config.
_LAYER_COUNT_ATTRS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def truncate_model(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A stand-in that runs the first `layers` decoder layers of a model, then its final norm and its head.

    Modules on the way to the layers are copied without what is in them; all weights are the model's own.
    Neither the model nor its config is touched.
    """
    depth = traits_of(model).num_layers
    paths = _layer_list_paths(model, depth)
    if not paths:
        kind = type(model).__name__
        raise UnsupportedModel(
            f"{kind} has no list of its {depth} layers, so that none can be left out: leave out early exit"
        )
    configs: dict[int, Any] = {}  # what deepcopy has copied, so that parts of a config stay parts of it
    standing = _copy_with_layers(model, depth, layers, configs)
    views: dict[str, Any] = {"": standing}
    for path in paths:
        way = path.split(".")
        for at in range(1, len(way)):
            here, above = ".".join(way[:at]), views[".".join(way[: at - 1])]
            if here not in views:
                views[here] = _copy_with_layers(above._modules[way[at - 1]], depth, layers, configs)
                above._modules[way[at - 1]] = views[here]
        holder = views[".".join(way[:-1])]
        stack: Any = _shallow_copy(holder._modules[way[-1]])
        stack._modules = dict(list(stack._modules.items())[:layers])
        holder._modules[way[-1]] = stack
    for view in views.values():
        for name, part in view._modules.items():
            # What has no weights may note on itself how far it was asked (rotary frequencies that stretch).
            if part is not None and not any(True for _ in part.parameters()):
                view._modules[name] = copy.deepcopy(part)
    whole: PreTrainedModel = standing
    return whole


def _layer_list_paths(model: PreTrainedModel, depth: int) -> list[str]:
    """The paths of the lists that hold something for each layer of the decoder, the outermost ones."""
    whole: Any = model
    decoder = whole.get_decoder() if hasattr(model, "get_decoder") else None
    inside = whole if decoder is None else decoder
    start = next((path for path, part in model.named_modules() if part is inside), "")
    found: list[str] = []
    for path, part in inside.named_modules():
        nested = any(path.startswith(f"{other}.") for other in found)
        if path and not nested and isinstance(part, nn.ModuleList) and len(part) == depth:
            found.append(path)
    return [f"{start}.{path}" if start else path for path in found]


def _shallow_copy(module: nn.Module) -> Any:
    """A module with the same weights and parts, whose attributes and parts are its own to change."""
    view: Any = object.__new__(type(module))
    vars(view).update(vars(module))
    vars(view)["_modules"] = dict(module._modules)
    vars(view).pop("generate", None)  # that of an attached model
    for name, value in vars(module).items():
        # What spreads a model over devices wraps its modules' calls, each bound to its module.
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(view)[name] = MethodType(value.__func__, view)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            vars(view)[name] = partial(value.func, view, *value.args[1:], **value.keywords)
    return view


def _copy_with_layers(module: nn.Module, depth: int, layers: int, configs: dict[int, Any]) -> Any:
    """The same, which counts fewer layers."""
    view = _shallow_copy(module)
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
