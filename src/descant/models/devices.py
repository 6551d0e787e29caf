"""The devices on which a model computes, which may differ from where its weights are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["input_device", "is_multi_device"]


def input_device(model: PreTrainedModel) -> torch.device:
    """The device on which a model expects its inputs: that of its input embeddings."""
    return _execution_device(_input_embeddings(model)) or torch.device(model.device)


def is_multi_device(model: PreTrainedModel) -> bool:
    """Whether a model computes on several devices, by its `device_map` or its input and output embeddings."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return True
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {_execution_device(_input_embeddings(model)), _execution_device(head)} - {None}
    return len(ends) > 1


def _input_embeddings(model: PreTrainedModel) -> Any:
    """The input embeddings of a model, None if it declares none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _execution_device(module: Any) -> torch.device | None:
    """The device on which a module computes: that of its accelerate hook, if any, else of its weights."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return None if weight is None else weight.device
