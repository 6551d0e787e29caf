"""Changes of a model's weights, or of what it computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils import prune

__all__ = ["CHANGES", "OF_ADAPTERS"]

Change = Callable[[Any], object]


def _moved(model: Any) -> torch.Tensor:
    """The embeddings, each as that of the token before it."""
    return model.get_input_embeddings().weight.detach().roll(1, 0)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(_moved(model))


def _data(model: Any) -> None:
    model.get_input_embeddings().weight.data.copy_(_moved(model))


def _new_data(model: Any) -> None:
    model.get_input_embeddings().weight.data = _moved(model)


def _step(optimizer: type[torch.optim.Optimizer], **fields: Any) -> Change:
    """A step of an optimizer, with gradients as large as the weights."""

    def change(model: Any) -> None:
        for weight in model.parameters():
            weight.grad = weight.detach().clone()
        optimizer(model.parameters(), lr=0.1, **fields).step()

    return change


def _loaded(model: Any) -> None:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def _hooked(model: Any) -> None:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: 0.5 - output)  # noqa: ARG005


def _pruned(model: Any) -> None:
    prune.l1_unstructured(model.get_input_embeddings(), "weight", 0.5)


def _scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("A", 3.0)


CHANGES: Mapping[str, Change] = {
    "in place": _in_place,
    "data": _data,
    "new data": _new_data,
    "fused AdamW": _step(torch.optim.AdamW, fused=True),
    "fused SGD": _step(torch.optim.SGD, fused=True),
    "SGD": _step(torch.optim.SGD),
    "load_state_dict": _loaded,
    "hook": _hooked,
    "prune": _pruned,
}
OF_ADAPTERS: Mapping[str, Change] = {
    "set_adapter": lambda model: model.set_adapter("B"),
    "set_scale": _scaled,
}
