"""What tells whether the weights of a model have changed, without reading them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["weight_versions"]


def weight_versions(model: Any) -> tuple[object, ...]:
    """Identity, address and number of in-place changes of each weight; those of `.data` do not count."""
    parameters = model.parameters() if callable(getattr(model, "parameters", None)) else ()
    return tuple((id(weight), *_version(weight)) for weight in parameters)


def _version(weight: Tensor) -> tuple[int, int]:
    try:
        return weight.data_ptr(), weight._version
    except RuntimeError:  # an inference tensor has no version, a wrapped one no address
        return 0, 0
