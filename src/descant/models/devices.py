"""Where the parts of a model compute, which need not be where their weights are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["input_device", "is_multi_device"]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its inputs: where it embeds them."""
    return _execution_device(_input_embeddings(model)) or torch.device(model.device)


def is_multi_device(model: PreTrainedModel) -> bool:
    """Whether parts of a model compute on different devices, by its `device_map` or by its two ends."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return True
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {_execution_device(_input_embeddings(model)), _execution_device(head)} - {None}
    return len(ends) > 1


def _input_embeddings(model: PreTrainedModel) -> Any:
    """The table that a model embeds tokens with; None where it names none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _execution_device(module: Any) -> torch.device | None:
    """The device of a module's own computation: as its hook says if weights are brought in from elsewhere."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return None if weight is None else weight.device
