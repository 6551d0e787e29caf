"""What tells whether a model computes the same as before, without reading its weights."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

__all__ = ["adapter_states", "weight_versions"]


def weight_versions(model: Any) -> tuple[object, ...]:
    """Identity, address and number of in-place changes of each weight, and the active PEFT adapters.

    Changes through `.data` do not count.
    """
    parameters = model.parameters() if callable(getattr(model, "parameters", None)) else ()
    versions = tuple((id(weight), *_version(weight)) for weight in parameters)
    return versions + adapter_states(model)


def adapter_states(model: Any) -> tuple[str, ...]:
    """The different states of layers with PEFT adapters: which are active, and whether they are disabled."""
    if "peft" not in sys.modules or not callable(getattr(model, "modules", None)):
        return ()
    # The attributes of PEFT's layers as they are stored: its properties search base classes of torch.
    layers = [vars(module) for module in model.modules() if "_active_adapter" in vars(module)]
    return tuple(sorted({f"{layer['_active_adapter']} {layer.get('_disable_adapters')}" for layer in layers}))


def _version(weight: Tensor) -> tuple[int, int]:
    try:
        return weight.data_ptr(), weight._version
    except RuntimeError:  # an inference tensor has no version, a wrapped one no address
        return 0, 0
