"""The baseline loop: forward with a preallocated cache and argmax. A lower bound of the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

__all__ = ["PreallocatedCache", "decode"]


class PreallocatedCache(Cache):
    """Preallocated keys and values, written by slice: no growth, no row moves, no mask."""

    def __init__(self, model: Any, rows: int, slots: int) -> None:
        # The base constructor would create layers; this cache only has its tensors.
        self.layers: list[Any] = []
        config = model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, slots, size)
        self._keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._values = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.start = 0  # write position of the next forward

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any
    ) -> tuple[Tensor, Tensor]:
        stop = self.start + key_states.shape[2]
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self.start : stop] = key_states
        values[:, :, self.start : stop] = value_states
        return keys[:, :, :stop], values[:, :, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return self.start + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False


@torch.no_grad()
def decode(model: Any, ids: Tensor, new: int) -> Tensor:
    """The `new` most likely tokens [B, new] after `ids` [B, L], without padding."""
    rows, length = ids.shape
    cache = PreallocatedCache(model, rows, length + new - 1)  # the last token is never fed
    tokens = ids.new_empty(rows, new)
    inputs = ids
    for at in range(new):
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        cache.start += inputs.shape[1]
        inputs = logits[:, -1].argmax(-1, keepdim=True)
        tokens[:, at : at + 1] = inputs
    return tokens
