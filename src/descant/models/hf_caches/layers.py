"""Slots of a cache as transformers looks at them: layers, and rows that stand at the right."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from descant.core.interfaces import KVCache
from descant.errors import format_value
from descant.kv_cache.attention_proxy import KVProxy

__all__ = ["HFCacheLayer", "KVPair", "empty_layers", "shift_right", "to_tensor", "with_grad"]

KVPair = tuple[Tensor, Tensor]  # keys and values of a layer, [R, H, S, D] each


class HFCacheLayer:
    """One layer of a cache as transformers looks at it, read when it is asked for."""

    supports_early_init = False  # the store makes room by itself

    def __init__(self, face: Any, layer: int) -> None:
        self._cache, self._layer = face, layer

    @property
    def keys(self) -> Tensor:
        """What its rows hold [R, H, S, D]."""
        return cast(Tensor, self._cache[self._layer][0])

    @property
    def values(self) -> Tensor:
        """What its rows hold [R, H, S, D]."""
        return cast(Tensor, self._cache[self._layer][1])

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return bool(self._cache.has_layer(self._layer))

    @property
    def is_sliding(self) -> bool:
        """Whether it forgets what has left its window."""
        return bool(self._cache.is_sliding[self._layer])

    @property
    def is_compileable(self) -> bool:
        """Whether its shape never changes."""
        return bool(self._cache.is_compileable)

    def get_seq_length(self) -> int:
        """How many positions it has read."""
        return int(self._cache.get_seq_length(self._layer))

    def __repr__(self) -> str:
        return f"{type(self._cache).__name__} layer {self._layer}"


def empty_layers(store: KVCache) -> dict[int, KVPair]:
    """The layers that a store has, and what each looks like: no slots of one row [1, H, 0, D]."""
    read, layers = getattr(store, "read", None), getattr(store, "layers", None)
    if read is not None and layers is not None:
        longest = store.lengths.argmax()[None]
        whole: dict[int, KVPair] = {layer: read(layer, longest) for layer in layers}
        return {layer: (key[:, :, :0], value[:, :, :0]) for layer, (key, value) in whole.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for name, block in store.state().items():
        *_, kind, layer = ("", *name.split("."))
        if kind in ("keys", "values"):
            found.setdefault(int(layer), {})[kind] = block[:1, :, :0]
    return {layer: (pair["keys"], pair["values"]) for layer, pair in found.items()}


def to_tensor(block: Any) -> Tensor:
    """A tensor, laid out if it was not."""
    if isinstance(block, KVProxy):
        return block.materialize()
    assert isinstance(block, Tensor), format_value(block)
    return block


def shift_right(block: Tensor, by: Tensor) -> Tensor:
    """Slots [R, H, S, D] of every row moved to the right by so many [R] (host); what comes in is zero."""
    at = torch.arange(block.shape[2]) - by[:, None]  # [R, S]
    index = at.clamp(0, block.shape[2] - 1).to(block.device)[:, None, :, None]
    moved = block.gather(2, index.expand(-1, block.shape[1], -1, block.shape[3]))
    return moved.masked_fill((at != at.clamp(0, block.shape[2] - 1)).to(block.device)[:, None, :, None], 0)


def with_grad(seen: Any, new: Tensor, at: int) -> Tensor:
    """What was seen, through which a gradient reaches the tokens just fed; the ones before are memory."""
    return torch.cat((seen[:, :, :at], new, seen[:, :, at + new.shape[2] :]), 2)
