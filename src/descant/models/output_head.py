"""The output head of a model on hidden states of any layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from descant.errors import InputError
from descant.models.peft_adapters import ADAPTER_NAME_KEY, PeftAdapters

__all__ = ["head_logits"]


def head_logits(model: Any, hidden: Tensor, adapters: PeftAdapters) -> Tensor:
    """Logits of hidden states [..., D] -> [..., V]."""
    head: Any = model.get_output_embeddings()
    if adapters.in_use and adapters.has_layer(head):
        must = "must be None for a method that reads logits of inner layers, since the head has adapters"
        raise InputError(ADAPTER_NAME_KEY, must, type(head).__name__, "use model.set_adapter")
    weight = next(head.parameters())
    vectors = hidden.to(weight.device, weight.dtype).flatten(0, -2)
    count = len(vectors)
    if weight.device.type == "cpu" and 3 < count < 16:
        # On a CPU 16 vectors take two thirds of the time of 7.
        vectors = torch.nn.functional.pad(vectors, (0, 0, 0, 16 - count))
    logits: Tensor = head(vectors)[:count]
    return logits.view(*hidden.shape[:-1], -1)
